"""Which save every rank has, learnt from two small words of each beside the steps; pure."""

from __future__ import annotations

from collections import deque


class Consensus:
    """One rank's side of learning the newest step whose files are durable on every rank.

    In each exchange a rank says the newest step that it has. The lowest of these is proposed to all: its
    rank has it, others may lack it, if their save of it has failed. So in a later exchange each says
    whether it lacks the proposal, and if none does, all have it. Every rank hears the same, so all learn the
    same at the same exchange, some steps late.
    """

    def __init__(self) -> None:
        self.newest: int | None = None  # step that every rank has
        self._own: set[int] = set()  # that this rank has, no older than `newest`
        self._proposed: int | None = None
        self._asked: deque[int | None] = deque([None])  # the proposal that was answered in each exchange

    def add(self, step: int) -> None:
        """This rank's files of `step` are durable."""
        self._own.add(step)

    def say(self) -> tuple[int, bool]:
        """For the next exchange: the newest step that this rank has, and whether it lacks the proposal.

        Without a step it is -1.
        """
        self._asked.append(self._proposed)
        return max(self._own, default=-1), self._proposed is not None and self._proposed not in self._own

    def hear(self, lowest: int, *, is_lacked: bool) -> int | None:
        """What the exchange before brought; at the first call nothing can have been said.

        Args:
            lowest: of the newest steps that ranks have; -1 if one has none.
            is_lacked: some rank lacks what was proposed then.

        Returns:
            A step that is now known to be on every rank, and was not before.
        """
        answered = self._asked.popleft()
        known = -1 if self.newest is None else self.newest
        learnt = None
        if answered is not None and not is_lacked and answered > known:
            learnt = self.newest = known = answered
            self._own = {step for step in self._own if step >= answered}
        self._proposed = lowest if lowest > known else None
        return learnt
