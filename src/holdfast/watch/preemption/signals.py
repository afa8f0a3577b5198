"""Signals that announce a preemption, recorded while training runs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
import traceback
import weakref
from types import FrameType
from typing import Any

from holdfast.system.callsite import is_loading, warn
from holdfast.system.linux.processes import handles_signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_NOTICE_S = 1.0  # time in which a trainer receives the signal that one of its workers has died of
_INTERRUPTED = b"\nholdfast: saving after this step, then stopping; Ctrl-C again stops at once\n"


class SignalRecorder:
    """Recorder of SIGTERM, SIGUSR1, SIGHUP (a closed terminal) and the first SIGINT.

    All recorders in a process share one handler per signal. It also calls the Python handler that was
    installed before. A second SIGINT raises KeyboardInterrupt at once. An ignored signal stays ignored, as
    under nohup. A handler that code other than Python installed is left alone, and so is each of SIGHUP. A
    forked child behaves as if nothing had been installed. Signals can only be recorded in the main thread.
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
        before = signal.getsignal(signal.SIGCHLD)
        if getattr(before, "__module__", "") == "torch.utils.data._utils.signal_handling":
            signal.signal(signal.SIGCHLD, _FailureHandler(before))
        return True

    def unwatch(self) -> None:
        """Stop recording signals. The last recorder to stop restores the previous handlers."""
        _watchers[:] = [ref for ref in _watchers if ref() not in (self, None)]
        if not _watchers and threading.current_thread() is threading.main_thread():
            _uninstall()


class _Handler:
    """Handler of one signal: records it for every watcher, then calls the previous handler."""

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
        watchers = _live() if self.is_of_this_process else []
        for watcher in watchers:
            watcher.received = watcher.received or signal.Signals(number).name
        if not watchers:  # do what the process would have done without this handler
            if callable(self.before):
                self.before(number, frame)
            elif self.before == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if _is_python_handler(self.before):
            self.before(number, frame)
        _discard_output_without_reader()
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            with contextlib.suppress(OSError):
                os.write(2, _INTERRUPTED)  # print is not reentrant: the handler may have interrupted it


def _discard_output_without_reader() -> None:
    """Discard output to a closed terminal: a `print` in the step that is still saved would raise an error."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)  # errors only
    for number, event in poll.poll(0):
        if event & select.POLLERR:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


class _FailureHandler:
    """Handler of SIGCHLD that defers the failures of workers after a notice.

    PyTorch's handler raises them wherever the trainer is, such as in the middle of an optimizer's step. Its
    loader finds a dead worker by itself when it waits for a batch.
    """

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the end of a child process."""
        try:
            self.before(number, frame)
        except RuntimeError:
            frames = [one for one, _ in traceback.walk_stack(frame)]
            if any(one.f_code.co_filename == __file__ for one in frames):
                return  # the notice is being recorded
            deadline = time.monotonic() + _NOTICE_S
            while not (notices := [one for one in _live() if one.received]) and time.monotonic() < deadline:
                time.sleep(0.01)  # a signal that arrives meanwhile is handled
            if not notices or is_loading(frames):
                raise


_watchers: list[weakref.ref[SignalRecorder]] = []


def _live() -> list[SignalRecorder]:
    return [watcher for ref in _watchers if (watcher := ref()) is not None]


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
    elif before != signal.SIG_IGN and not (number == signal.SIGHUP and _is_python_handler(before)):
        signal.signal(number, _Handler(number, before))


def _uninstall() -> None:
    """Restore the previous handlers, unless ours have been replaced since."""
    for number in (*SIGNALS, signal.SIGCHLD):
        handler = signal.getsignal(number)
        if isinstance(handler, (_Handler, _FailureHandler)):
            signal.signal(number, handler.before)


def _reset_in_child() -> None:
    _watchers.clear()
    _uninstall()


os.register_at_fork(after_in_child=_reset_in_child)
