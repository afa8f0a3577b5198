"""Lease of an attempt on a process that serves its node: starts it, waits for it, replaces a dead one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from holdfast.system import backoff

STOPPED = "stopped"
"""File in the folder of an attempt that is being killed."""
_POLL_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_STARTS = 3
"""Limit of starts of a server that dies before it is ready."""


class Lease(ABC):
    """Lease of one attempt on the server of its node.

    Args:
        attempt: folder of the attempt.
        server: name of the process, for messages.
        ready: "its mounts were ready", for messages.
    """

    def __init__(self, attempt: Path, server: str, ready: str) -> None:
        self._attempt, self._server, self._ready_text = attempt, server, ready
        self._again_s, self._num_starts = 0.0, 0

    def wait_until_ready(self, meanwhile: Callable[[], None]) -> str | None:
        """Wait until the server is ready.

        Args:
            meanwhile: called repeatedly.

        Returns:
            Why it failed, or None.

        Blocks: as long as that takes, while a server is running.
        """
        num_starts = 0
        while (error := self._result()) is None:
            if (self._attempt / STOPPED).exists():
                return f"the attempt was ended before {self._ready_text}"
            if self._start():
                num_starts += 1
            if num_starts > _MAX_STARTS:
                return f"the {self._server} died {_MAX_STARTS} times"
            meanwhile()
            time.sleep(_POLL_S)
        return error or None

    def poll(self) -> None:
        """Replace a server that was killed."""
        if time.monotonic() >= self._again_s and self._start():
            self._num_starts += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_starts, _PAUSE_S, _LONGEST_PAUSE_S)

    @abstractmethod
    def _result(self) -> str | None:
        """Return why the server failed, or an empty text if it is ready. None: it still starts."""

    @abstractmethod
    def _start(self) -> bool:
        """Start a server, unless one is running. Return True if it was started."""
