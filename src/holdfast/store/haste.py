"""How long the requests of this process may take, where a person waits for them: less than a training's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.units import format_duration

_QUIET_S = 3.0  # an answer that comes sooner is not worth a line


class Haste:
    """The limit of a command, and its way to tell a person that a store does not answer.

    A training has none: it waits as long as its address says.
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self._say: Callable[[str], None] | None = None
        self._said: set[str] = set()

    @contextmanager
    def limited(self, limit_s: float | None, say: Callable[[str], None]) -> Iterator[None]:
        """Limit every request that begins in the block.

        Args:
            limit_s: seconds after which a store that does not answer is given up; None for no limit.
            say: called with a line when a store has not answered for 3 s, once for each place.
        """
        before = self.limit_s, self._say
        self.limit_s, self._say = limit_s, None if limit_s is None else say
        self._said.clear()
        try:
            yield
        finally:
            self.limit_s, self._say = before

    def say(self, line: str) -> None:
        """Print a line for the person who waits for a command; do nothing in a training."""
        if self._say is not None:
            self._say(line)

    @contextmanager
    def saying(self, place: str) -> Iterator[None]:
        """Report a request, made in the block, that is not answered soon."""
        if self._say is None or place in self._said:
            yield
            return
        timer = threading.Timer(_QUIET_S, self._report, (place,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report(self, place: str) -> None:
        if self._say is not None and self.limit_s is not None and place not in self._said:
            self._said.add(place)
            self._say(
                f"{place} has not answered for {format_duration(_QUIET_S)}; trying again for up to "
                f"{format_duration(self.limit_s)} (--patience)"
            )


haste = Haste()
"""The limit of this process."""
