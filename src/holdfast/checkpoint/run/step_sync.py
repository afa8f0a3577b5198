"""Exchange of the ranks after each step: the decision to save it, and the saves that all have."""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Sequence

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.keeper import Keeper
from holdfast.checkpoint.retention import Keep, best_first
from holdfast.checkpoint.run.cadence import Flags
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.saves import Saves
from holdfast.checkpoint.watch import Act, Vote


class StepSync:
    """One rank's side of the exchange that follows each step of an attempt."""

    def __init__(self, components: Components, saves: Saves) -> None:
        self._components, self._saves = components, saves
        self._is_late = components.ranks.world_size > 1  # flags arrive with the next exchange
        self._scores = Scores(components.options.keep, is_alone=components.ranks.world_size == 1)

    def exchange(self, step: int, keeper: Keeper | None, votes: Sequence[Vote]) -> Flags:
        """Exchange flags about a completed step with the other ranks, and return their decisions.

        Ranks: collective.
        """
        saves, cadence, now_s = self._saves, self._components.cadence, time.monotonic()
        acts = {vote.act for vote in votes}
        saves.settle()
        newest, lacks_proposal = saves.stable.propose()
        flags = Flags(
            is_preempted=Act.STOP in acts,
            is_due=Act.SAVE in acts,
            lacks_proposal=lacks_proposal,
            is_torn=saves.must_repeat,
            must_go_back=Act.GO_BACK in acts,
        )
        values, (lowest, score) = self._components.ranks.exchange_flags(
            step, cadence.add_clock(step, now_s, flags), (newest, self._score_of_last())
        )
        received = self._without_old(Flags(*values))
        self._receive_stable(lowest, keeper, is_lacked=received.lacks_proposal)
        self._receive_score(score, keeper)
        decided = cadence.decide(step, now_s, received)
        if decided.is_torn:
            saves.note_tear()
        is_saved = saves.last is not None and saves.last.step == step
        return decided._replace(is_due=decided.is_due and not is_saved)

    def _without_old(self, received: Flags) -> Flags:
        """Return the received flags; at first without what an attempt before has sent about its steps."""
        is_old, self._is_late = self._is_late, False
        return Flags(is_preempted=received.is_preempted) if is_old else received

    def _receive_stable(self, lowest: int, keeper: Keeper | None, *, is_lacked: bool) -> None:
        """Process the exchange about the newest step that all ranks have; see `StableStep`."""
        step = self._saves.stable.receive(lowest, is_lacked=is_lacked)
        if step is not None and keeper is not None and keeper.config.is_node_local:
            keeper.mark_complete(CheckpointId(attempt=keeper.config.attempt, step=step))

    def _score_of_last(self) -> int:
        """Return the value of the last save's metric as it is exchanged; see `Scores`."""
        last, components = self._saves.last, self._components
        if components.tiers.local is None or last is None:
            return self._scores.send(None, None)
        metric = components.options.keep.metric
        return self._scores.send(last.step, components.metrics.value_of_save(last.step, metric))

    def _receive_score(self, number: int, keeper: Keeper | None) -> None:
        """Process the exchange about the last save's metric: the best saves are kept for home."""
        best = self._scores.receive(number)
        if best is not None and keeper is not None:
            keeper.send_best(best, is_due=False)

    def score_alone(self, keeper: Keeper | None) -> None:
        """Find the best saves without an exchange, if there is one rank."""
        if self._components.ranks.world_size == 1:
            self._receive_score(self._score_of_last(), keeper)

    def send_best_home(self, keeper: Keeper) -> None:
        """Send the best saves home, beside a save that is due there: so all ranks send the same."""
        if self._scores.best:
            keeper.send_best(self._scores.best, is_due=True)


_NO_SCORE = (1 << 63) - 1  # the greatest number that is exchanged; as a float it is NaN


class Scores:
    """One rank's side of finding the best saves of an attempt.

    Rank 0 alone has metrics. In each exchange it sends the value of the last save as an integer of the same
    bits. The others send the greatest integer, so that the lowest one is rank 0's.

    Args:
        is_alone: there is one rank, which receives its own number at once instead of one exchange later.
    """

    def __init__(self, keep: Keep, *, is_alone: bool) -> None:
        self._keep = keep
        self._values: dict[CheckpointId, float] = {}  # of attempt 0, as all are of one
        self.best: list[int] = []  # steps of the best saves, best first
        self._sent: deque[int | None] = deque() if is_alone else deque([None])

    def send(self, step: int | None, value: float | None) -> int:
        """Return the number to send.

        Args:
            step: of the last save; None before the first.
            value: its metric; None on other ranks than 0, and without one.
        """
        self._sent.append(step)
        if self._keep.best is None or value is None or not math.isfinite(value):
            return _NO_SCORE
        return struct.unpack("<q", struct.pack("<d", value + 0.0))[0]  # -0.0 has no negative

    def receive(self, number: int) -> list[int] | None:
        """Process a received number. Return the steps of the best saves if they have changed."""
        step = self._sent.popleft()
        value = struct.unpack("<d", struct.pack("<q", number))[0]
        if step is None or self._keep.best is None or not math.isfinite(value):
            return None
        self._values[CheckpointId(attempt=0, step=step)] = value
        ordered = best_first(self._values, self._values, self._keep.mode)
        before, self.best = self.best, [one.step for one in ordered[: self._keep.best]]
        return self.best if set(self.best) != set(before) else None
