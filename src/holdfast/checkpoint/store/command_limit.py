"""Time limit for requests while a command's user waits; training has no such limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.system.log import QUIET_S, reported_if_slow
from holdfast.system.units import format_duration


class CommandLimit:
    """Time limit of a command, and the function that notifies its user of slow stores."""

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self._notify: Callable[[str], None] | None = None
        self._reported: set[str] = set()

    @contextmanager
    def limited(self, limit_s: float | None, notify: Callable[[str], None]) -> Iterator[None]:
        """Limit every request in the block; `notify` gets a line for each place that is silent for 3 s."""
        before = self.limit_s, self._notify
        self.limit_s, self._notify = limit_s, None if limit_s is None else notify
        self._reported.clear()
        try:
            yield
        finally:
            self.limit_s, self._notify = before

    def notify(self, line: str) -> None:
        """Send a line to the command's user. Does nothing in training."""
        if self._notify is not None:
            self._notify(line)

    @contextmanager
    def reporting(self, place: str) -> Iterator[None]:
        """Notify the user if a request made within the block is slow."""
        if self._notify is None or place in self._reported:
            yield
            return
        with reported_if_slow(lambda: self._report(place)):
            yield

    def _report(self, place: str) -> None:
        if self._notify is not None and self.limit_s is not None and place not in self._reported:
            self._reported.add(place)
            self._notify(
                f"{place} has not answered for {format_duration(QUIET_S)}; retrying for up to "
                f"{format_duration(self.limit_s)} (--patience)"
            )


command_limit = CommandLimit()
"""The time limit of this process."""
