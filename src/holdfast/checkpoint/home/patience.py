"""Retries of failed reads, with growing pauses, for a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import RetryLater
from holdfast.system import backoff
from holdfast.system.log import QUIET_S
from holdfast.system.units import format_duration

LIMIT_S = 120.0
"""Seconds for which a restore retries, by default."""
_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_SHARE = 0.1, 5.0, 0.5
_T = TypeVar("_T")


class Patience:
    """Time limit for retries of one read.

    Args:
        limit_s: seconds from the first failure to the last try.
        log: called with a line once the failure has lasted a few seconds.
    """

    def __init__(self, limit_s: float, log: Callable[[str], None]) -> None:
        self._limit_s, self._log = limit_s, log
        self._began_s: float | None = None
        self._has_logged = False

    @property
    def spent_s(self) -> float:
        """Seconds since the first failure."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def lasts(self) -> bool:
        """Return True while another try is allowed. The first call starts the clock."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        return self.spent_s < self._limit_s

    def pause(self, what: str, reason: str) -> None:
        """Wait before another try.

        Args:
            what: name of the thing that could not be read, for the line.

        Blocks: for half of the time spent so far, at most 5 s.
        """
        if self.spent_s >= QUIET_S and not self._has_logged:
            self._has_logged = True
            self._log(f"{what} cannot be read; trying again for {format_duration(self._limit_s)}: {reason}")
        pause_s = backoff.proportional(self.spent_s, _PAUSE_SHARE, _FIRST_PAUSE_S, _LAST_PAUSE_S)
        time.sleep(min(pause_s, max(self._limit_s - self.spent_s, 0.0)))

    def reset(self) -> None:
        """Restart the limit, after a successful read."""
        self._began_s, self._has_logged = None, False

    def spend(self, what: str, act: Callable[[], _T]) -> _T:
        """Return the result of `act`; call it again while it raises RetryLater.

        Blocks: until `act` returns, at most for the limit and one more call.
        """
        while True:
            try:
                result = act()
            except RetryLater as error:
                if not self.lasts():
                    message = f"{what} could not be read for {format_duration(self.spent_s)}: {error}"
                    raise RetryLater(message, step=error.step, key=error.key) from error
                self.pause(what, str(error))
            else:
                self.reset()
                return result
