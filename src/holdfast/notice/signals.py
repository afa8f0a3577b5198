"""The signals by which schedulers and people announce the end, noted while a training runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.callsite import warn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERRUPTED = b"\nholdfast: saving after this step, then stopping; Ctrl-C again stops at once\n"


class Signals:
    """Notes SIGTERM, SIGUSR1 and the first SIGINT as a name to ask for.

    All of them in a process share one handler for each signal, which also calls the Python handler that was
    installed before. A second SIGINT raises KeyboardInterrupt at once. A signal that was ignored stays
    ignored, and one whose handler was not installed by Python is left alone. A forked child behaves as if
    nothing had been installed. Only the main thread can watch; elsewhere `watch` returns False.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The first signal that came."""

    def watch(self) -> bool:
        """Start noting signals; True if they are noted now."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if all(ref() is not self for ref in _watchers):
            _watchers.append(weakref.ref(self))
        for number in SIGNALS:
            _install(number)
        return True

    def unwatch(self) -> None:
        """Stop noting signals. The last one to stop restores the handlers from before."""
        _watchers[:] = [ref for ref in _watchers if ref() not in (self, None)]
        if not _watchers and threading.current_thread() is threading.main_thread():
            _uninstall()


class _Handler:
    """Our handler of one signal: notes it for every watcher, then passes it on to the handler from before.

    Args:
        number: of the signal.
        before: the handler from before, as `signal.getsignal` returns it.
    """

    def __init__(self, number: int, before: Any) -> None:
        self.number = number
        self.before = before
        self._pid = os.getpid()
        self._is_running = False
        self._num_interrupts = 0

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that installed it."""
        return os.getpid() == self._pid

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._is_running:  # a handler in between called us back
            return
        self._is_running = True
        try:
            self._handle(number, frame)
        finally:
            self._is_running = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.is_of_this_process:
            if not self._is_left_to_the_trainer():
                self._pass_on(number, frame)
            return
        watchers = [one for ref in _watchers if (one := ref()) is not None]
        for one in watchers:
            one.name = one.name or signal.Signals(number).name
        if not watchers:
            self._pass_on(number, frame)
            return
        if _is_python_handler(self.before):
            self.before(number, frame)
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            with contextlib.suppress(OSError):
                os.write(2, _INTERRUPTED)  # print may not be entered from a handler while it runs

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what would have been done without us."""
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_left_to_the_trainer(self) -> bool:
        """True for the first Ctrl-C in a worker of a data loader: the trainer still needs its batches."""
        loading = sys.modules.get("torch.utils.data")
        if self.number != signal.SIGINT or loading is None or os.getppid() != self._pid:
            return False
        self._num_interrupts += 1
        return self._num_interrupts == 1 and loading.get_worker_info() is not None

    def reset_in_child(self) -> Any:
        """Return the handler that a forked child should have: the one from before, but for SIGINT."""
        self._is_running, self._num_interrupts = False, 0
        return self if self.number == signal.SIGINT and callable(self.before) else self.before


_watchers: list[weakref.ref[Signals]] = []


def _is_python_handler(handler: Any) -> bool:
    """True for a handler that somebody wrote in Python; the default of SIGINT is none."""
    return callable(handler) and handler is not signal.default_int_handler


def _install(number: int) -> None:
    before = signal.getsignal(number)
    if isinstance(before, _Handler):
        if before.is_of_this_process:
            return
        before = before.before
    if before is None or (before == signal.SIG_DFL and _is_caught(number)):
        warn(
            f"{signal.Signals(number).name} is no preemption notice in this process: code that is not Python "
            "has installed a handler for it, which was left alone.",
            RuntimeWarning,
        )
    elif before != signal.SIG_IGN:
        signal.signal(number, _Handler(number, before))


def _is_caught(number: int) -> bool:
    """True if this process has a handler for a signal, whatever installed it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _uninstall() -> None:
    """Restore the handlers from before, unless somebody has installed another one since."""
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Handler):
            signal.signal(number, handler.before)


def _reset_in_child() -> None:
    _watchers.clear()
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Handler):
            signal.signal(number, handler.reset_in_child())


os.register_at_fork(after_in_child=_reset_in_child)
