"""Stable step: newest save that is durable on every rank, found from two values per rank and step; pure."""

from __future__ import annotations

from collections import deque


class StableStep:
    """One rank's side of finding the newest step whose files are durable on every rank.

    In each exchange a rank sends the newest step that it has. The lowest of these becomes the proposal: its
    rank has it, others may lack it because their save of it has failed. In a later exchange each rank
    sends whether it lacks the proposal. If no rank does, the step is stable. Every rank receives the same
    values, so all find the same step in the same exchange, some steps late.
    """

    def __init__(self) -> None:
        self.newest: int | None = None  # the stable step
        self._own: set[int] = set()  # durable on this rank, no older than `newest`
        self._proposed: int | None = None
        self._asked: deque[int | None] = deque([None])  # the proposal that was answered in each exchange

    def add(self, step: int) -> None:
        """Record that this rank's files of `step` are durable."""
        self._own.add(step)

    def propose(self) -> tuple[int, bool]:
        """Return what to send: the newest step of this rank, else -1, and whether it lacks the proposal."""
        self._asked.append(self._proposed)
        return max(self._own, default=-1), self._proposed is not None and self._proposed not in self._own

    def receive(self, lowest: int, *, is_lacked: bool) -> int | None:
        """Process the outcome of the exchange before; at the first call there was none.

        Args:
            lowest: of the newest steps of all ranks; -1 if a rank has none.
            is_lacked: some rank lacks the step that was proposed then.

        Returns:
            A step that is now known to be on every rank, and was not before.
        """
        answered = self._asked.popleft()
        known = -1 if self.newest is None else self.newest
        found = None
        if answered is not None and not is_lacked and answered > known:
            found = self.newest = known = answered
            self._own = {step for step in self._own if step >= answered}
        self._proposed = lowest if lowest > known else None
        return found
