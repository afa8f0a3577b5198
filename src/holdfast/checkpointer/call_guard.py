"""Guard against calls from signal handlers that would wait for the interrupted call for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from holdfast.errors import InvalidInput


class CallGuard:
    """Registry of the calls under way on one object, by thread.

    A signal handler runs in the main thread, in the middle of whatever the main thread does. A call from it
    that needs an interrupted call to finish first would block for ever, so it is refused.
    """

    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self._alone = threading.Lock()

    @contextlib.contextmanager
    def guard(self, name: str, *, alone: bool = False) -> Iterator[None]:
        """Refuse further calls of this thread while the body runs.

        Args:
            name: name of the call, for the error.
            alone: wait for the calls of other threads that must run alone too.

        Raises:
            InvalidInput: a call of this thread is under way.
        """
        thread = threading.get_ident()
        if thread in self._running:
            raise InvalidInput(
                f"{name} was called while {self._running[thread]} was running in the same thread, and would "
                "wait for it for ever. This call did nothing. Call it neither in a signal handler nor in a "
                "state_dict(): let the handler set a flag that the loop checks after each step, or rely on "
                "should_save(), which is true after SIGTERM, SIGUSR1 and Ctrl-C."
            )
        try:
            self._running[thread] = name
            with self._alone if alone else contextlib.nullcontext():
                yield
        finally:
            self._running.pop(thread, None)
