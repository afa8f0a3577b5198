"""Exchange of the ranks after each step: the decision to save it, and the saves that all have."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.keeper import Keeper
from holdfast.checkpoint.retention import Keep, best_first
from holdfast.checkpoint.run.cadence import Flags
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.saves import Saves
from holdfast.checkpoint.watch import Act, Vote
from holdfast.system.host_memory import available_bytes
from holdfast.system.units import format_bytes, format_duration, plural

if TYPE_CHECKING:
    from holdfast.checkpoint.run.mirroring import Mirroring


class ExchangeRecord(NamedTuple):
    """Facts of this rank at an exchange, which the outcome of the exchange is about."""

    step: int
    proposed: int | None  # see `StableStep`
    saved: int | None  # step of the last save, whose metric was sent
    mirrored: int | None = None  # step whose state was sent, see `Mirroring`


class StepSync:
    """One rank's side of the exchange that follows each step of an attempt."""

    def __init__(self, components: Components, saves: Saves, mirroring: Mirroring | None) -> None:
        self._components, self._saves, self._mirroring = components, saves, mirroring
        self.must_save = False  # whatever the policies: the restored step is not in a store
        self._is_alone = components.ranks.world_size == 1
        self._has_shown = False  # what fits
        self._sent: ExchangeRecord | None = None  # at the exchange before
        self._scores = Scores(components.options.keep)

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
            is_due=Act.SAVE in acts or (self.must_save and saves.last is None),
            lacks_proposal=lacks_proposal,
            is_torn=saves.must_repeat,
            must_go_back=Act.GO_BACK in acts,
        )
        mirrored, state = (None, 0) if self._mirroring is None else self._mirroring.propose()
        saved = saves.last.step if saves.last is not None else None
        sent = ExchangeRecord(step, saves.stable.proposed, saved, mirrored)
        values, (lowest, score, state) = self._components.ranks.exchange_flags(
            step, cadence.add_clock(step, now_s, flags), (newest, self._score_of_last(), state)
        )
        # Several ranks receive the outcome of the exchange before, a single one that of this exchange.
        answered, self._sent = sent if self._is_alone else self._sent, sent
        received = Flags(*values)
        if answered is None:  # what the attempt before has sent is about its own steps
            decided = cadence.decide(step, now_s, Flags(is_preempted=received.is_preempted), sent_step=0)
        else:
            stable = saves.stable.receive(answered.proposed, lowest, is_lacked=received.lacks_proposal)
            if stable is not None and keeper is not None and keeper.config.is_node_local:
                keeper.mark_complete(CheckpointId(attempt=keeper.config.attempt, step=stable))
            self._receive_score(answered.saved, score, keeper)
            mirroring = self._mirroring
            if mirroring is not None and mirroring.receive(answered.mirrored, state) and keeper is not None:
                keeper.keep_copies(mirroring.kept)
                self._show_what_fits(mirroring, keeper, step)
            decided = cadence.decide(step, now_s, received, sent_step=answered.step)
        if decided.is_torn:
            saves.note_tear()
        return decided._replace(is_due=decided.is_due and step != sent.saved)

    def _show_what_fits(self, mirroring: Mirroring, keeper: Keeper, step: int) -> None:
        """Show once, with the first copy, how often peers can copy a save, and the memory for it."""
        peers, last = keeper.config.peers, self._saves.last
        if self._has_shown or mirroring.held is None or peers is None or last is None:
            return
        self._has_shown = True
        num_steps, num_hosts = step - mirroring.held, len(peers.holders)
        self._components.show(
            f"step {mirroring.held} ({format_bytes(last.num_bytes)}) was in memory of "
            f"{plural(num_hosts, 'other host')} after {format_duration(mirroring.took_s)}, "
            f"{plural(num_steps, 'step')}: every={num_steps} or more copies each save. This takes "
            f"{format_bytes((3 + 2 * num_hosts) * last.num_bytes)} of a host for each rank; "
            f"{format_bytes(available_bytes())} are free here"
        )

    def _score_of_last(self) -> int:
        """Return the value of the last save's metric as it is exchanged; see `Scores`."""
        last, components = self._saves.last, self._components
        if components.tiers.local is None or last is None:
            return _NO_SCORE
        metric = components.options.keep.metric
        return self._scores.encode(components.metrics.value_of_save(last.step, metric))

    def _receive_score(self, step: int | None, number: int, keeper: Keeper | None) -> None:
        """Process the metric of a save: the best saves are kept for home."""
        best = None if step is None else self._scores.receive(step, number)
        if best is not None and keeper is not None:
            keeper.send_best(best, is_due=False)

    def score_alone(self, keeper: Keeper | None) -> None:
        """Find the best saves without an exchange, if there is one rank."""
        if self._is_alone and self._saves.last is not None:
            self._receive_score(self._saves.last.step, self._score_of_last(), keeper)

    def send_best_home(self, keeper: Keeper) -> None:
        """Send the best saves home, beside a save that is due there: so all ranks send the same."""
        if self._scores.best:
            keeper.send_best(self._scores.best, is_due=True)


_NO_SCORE = (1 << 63) - 1  # the greatest number that is exchanged; as a float it is NaN


class Scores:
    """One rank's side of finding the best saves of an attempt.

    Rank 0 alone has metrics. In each exchange it sends the value of the last save as an integer of the same
    bits. The others send the greatest integer, so that the lowest one is rank 0's.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._values: dict[CheckpointId, float] = {}  # of attempt 0, as all are of one
        self.best: list[int] = []  # steps of the best saves, best first

    def encode(self, value: float | None) -> int:
        """Return the number to send for the metric of a save; None on other ranks than 0, and without one."""
        if self._keep.best is None or value is None or not math.isfinite(value):
            return _NO_SCORE
        return struct.unpack("<q", struct.pack("<d", value + 0.0))[0]  # -0.0 has no negative

    def receive(self, step: int, number: int) -> list[int] | None:
        """Process the number of a save. Return the steps of the best saves if they have changed."""
        value = struct.unpack("<d", struct.pack("<q", number))[0]
        if self._keep.best is None or not math.isfinite(value):
            return None
        self._values[CheckpointId(attempt=0, step=step)] = value
        ordered = best_first(self._values, self._values, self._keep.mode)
        before, self.best = self.best, [one.step for one in ordered[: self._keep.best]]
        return self.best if set(self.best) != set(before) else None
