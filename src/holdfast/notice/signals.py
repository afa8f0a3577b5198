"""Signals that announce a preemption, recorded while training runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from holdfast.callsite import warn
from holdfast.linux.processes import handles_signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERRUPTED = b"\nholdfast: saving after this step, then stopping; Ctrl-C again stops at once\n"


class SignalRecorder:
    """Recorder of SIGTERM, SIGUSR1 and the first SIGINT.

    All recorders in a process share one handler per signal. It also calls the Python handler that was
    installed before. A second SIGINT raises KeyboardInterrupt at once. An ignored signal stays ignored, and a
    handler that code other than Python installed is left alone. A forked child behaves as if nothing had been
    installed. Signals can only be recorded in the main thread.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the first signal that arrived."""

    def watch(self) -> bool:
        """Start recording signals. Return False outside the main thread, where that is impossible."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if all(ref() is not self for ref in _watchers):
            _watchers.append(weakref.ref(self))
        for number in SIGNALS:
            _install(number)
        return True

    def unwatch(self) -> None:
        """Stop recording signals. The last recorder to stop restores the previous handlers."""
        _watchers[:] = [ref for ref in _watchers if ref() not in (self, None)]
        if not _watchers and threading.current_thread() is threading.main_thread():
            _uninstall()


class _Handler:
    """Handler of one signal: records it for every watcher, then calls the previous handler.

    Args:
        before: previous handler, as `signal.getsignal` returns it.
    """

    def __init__(self, number: int, before: Any) -> None:
        self.number = number
        self.before = before
        self._pid = os.getpid()
        self._is_running = False
        self._num_interrupts = 0

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that installed the handler."""
        return os.getpid() == self._pid

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._is_running:  # a handler installed in between has called this one back
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
            one.received = one.received or signal.Signals(number).name
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
                os.write(2, _INTERRUPTED)  # print is not reentrant: the handler may have interrupted it

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the process would have done without this handler."""
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_left_to_the_trainer(self) -> bool:
        """Return True for a data loader worker's first Ctrl-C: the trainer still needs its batches."""
        loading = sys.modules.get("torch.utils.data")
        if self.number != signal.SIGINT or loading is None or os.getppid() != self._pid:
            return False
        self._num_interrupts += 1
        return self._num_interrupts == 1 and loading.get_worker_info() is not None

    def reset_in_child(self) -> Any:
        """Return the handler for a forked child: the previous one, except for SIGINT."""
        self._is_running, self._num_interrupts = False, 0
        return self if self.number == signal.SIGINT and callable(self.before) else self.before


_watchers: list[weakref.ref[SignalRecorder]] = []


def _is_python_handler(handler: Any) -> bool:
    """Return True for a user's Python handler. Python's default one for SIGINT does not count."""
    return callable(handler) and handler is not signal.default_int_handler


def _install(number: int) -> None:
    before = signal.getsignal(number)
    if isinstance(before, _Handler):
        if before.is_of_this_process:
            return
        before = before.before
    if before is None or (before == signal.SIG_DFL and handles_signal(os.getpid(), number)):
        warn(
            f"{signal.Signals(number).name} is not treated as a preemption notice in this process: a handler "
            "that was not installed by Python stays in place.",
            RuntimeWarning,
        )
    elif before != signal.SIG_IGN:
        signal.signal(number, _Handler(number, before))


def _uninstall() -> None:
    """Restore the previous handlers, unless ours have been replaced since."""
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
