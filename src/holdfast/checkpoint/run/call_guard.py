"""Guard against calls that cannot be served: within another call, after the end, or in a forked process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from holdfast.errors import InvalidInput


class CallGuard:
    """Registry of the calls under way on one Checkpointer, by thread.

    A signal handler runs in the main thread, in the middle of whatever the main thread does. A call from it
    that needs an interrupted call to finish first would block for ever, so it is refused.
    """

    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self._alone = threading.Lock()
        self._pid, self._is_closed = os.getpid(), False

    @property
    def is_open(self) -> bool:
        """True until `close`, in the process that made it."""
        return not self._is_closed and os.getpid() == self._pid

    def close(self) -> None:
        """Refuse all further calls."""
        self._is_closed = True

    def check(self) -> None:
        """Check that calls can be served."""
        if self._is_closed:
            raise InvalidInput("This Checkpointer is closed. Make a new one.")
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"This Checkpointer belongs to process {self._pid} and was carried into process "
                f"{os.getpid()} by a fork. Use it only in the process that made it."
            )

    @contextlib.contextmanager
    def guard(self, name: str, *, alone: bool = False) -> Iterator[None]:
        """Refuse further calls of this thread while the body runs.

        Args:
            name: name of the call, for the error.
            alone: wait for the calls of other threads that must run alone too.
        """
        self.check()
        thread = threading.get_ident()
        if thread in self._running:
            raise InvalidInput(
                f"{name} was called while {self._running[thread]} was running in the same thread, and would "
                "wait for it for ever. This call did nothing. Call it neither in a signal handler nor in a "
                "state_dict(): let the handler set a flag that the loop checks after each step, or rely on "
                "should_save(), which is true after SIGTERM, SIGUSR1, SIGHUP and Ctrl-C."
            )
        try:
            self._running[thread] = name
            with self._alone if alone else contextlib.nullcontext():
                yield
        finally:
            self._running.pop(thread, None)
