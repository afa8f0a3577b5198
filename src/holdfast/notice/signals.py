"""The signals by which schedulers and people announce the end, taken over while a training runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERRUPTED = b"\nholdfast: saving after this step, then stopping; Ctrl-C again stops at once\n"


class Signals:
    """Turns SIGTERM, SIGUSR1 and the first SIGINT into a name to ask for.

    A second SIGINT is a person who does not want to wait: it raises KeyboardInterrupt.
    Only the main thread can watch signals; elsewhere `watch` does nothing and returns False.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The first signal that came."""
        self._before: dict[int, object] = {}
        self._interrupted = False

    def watch(self) -> bool:
        """Take over the signals; True if they are watched now."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return True

    def unwatch(self) -> None:
        """Give the signals back to whoever had them before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # nobody has put theirs over ours meanwhile
                signal.signal(number, handler or signal.SIG_DFL)  # pyright: ignore[reportArgumentType]
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self.name = self.name or signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupted = True
            with contextlib.suppress(OSError):
                os.write(2, _INTERRUPTED)  # print may not be entered from a handler while it is at work
