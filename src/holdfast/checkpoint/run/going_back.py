"""Going back to a healthy checkpoint: planned by all ranks, recorded, and its samples left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import MAX_ROLLBACK_KEYS, Rollback
from holdfast.checkpoint.format.sections import MAX_REASON_CHARS
from holdfast.checkpoint.home.newest import Patience
from holdfast.checkpoint.home.rollbacks import Rollbacks, find_healthy, write_rollback
from holdfast.checkpoint.keeper import KeeperConfig
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.run.attempt import Attempt
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.watching import NamedVote
from holdfast.checkpoint.state import Skippable
from holdfast.checkpoint.watch import Act, Vote
from holdfast.errors import Diverged, HoldfastError, InvalidInput
from holdfast.system.environment import MAX_PLACE, JobReport, report_to_job
from holdfast.system.log import get_logger
from holdfast.system.units import plural

_log = get_logger("checkpoint.run")
Range = tuple[int, int]
"""First sample of a range, and the sample after its last one."""


class PlannedRollback(Struct, frozen=True):
    """Rollback that all ranks have agreed on."""

    watch: str  # that asked for it
    vote: Vote  # the votes of all ranks, merged
    last_step: int  # newest step of the training
    choices: tuple[CheckpointId, ...]  # to go back to, the newest first
    in_a_row: int  # rollbacks without progress, with this one


class GoingBack:
    """Going back of one rank, over all attempts of a Checkpointer."""

    def __init__(self, components: Components) -> None:
        self.planned: PlannedRollback | None = None  # None while training need not go back
        self.rollbacks = Rollbacks()  # of the run so far, equal on all ranks
        self._components = components
        self._answered: set[tuple[str, int]] = set()  # watch, and first step of its trouble

    def check(self) -> None:
        """Check that training has gone back, where it must."""
        if self.planned is not None:
            raise InvalidInput(
                f"{self.planned.vote.reason}, so training has to go back, and it continued. With a watch "
                'that goes back, such as Spike("rollback"), a loop of your own calls '
                "`step = ckpt.roll_back()` when `ckpt.must_go_back` is set after should_save(), or counts by "
                "step_done(), or runs over steps(). Nothing was restored.",
                step=self.planned.last_step,
            )

    def unanswered(self, votes: Sequence[NamedVote]) -> list[NamedVote]:
        """Return the votes to go back that the ranks have not decided about yet."""
        return [
            one
            for one in votes
            if one.vote.act is Act.GO_BACK and (one.watch, one.vote.since) not in self._answered
        ]

    def decide(self, step: int, attempt: Attempt, votes: Sequence[NamedVote]) -> None:
        """Agree on the checkpoint to go back to, if there is one.

        A trouble of which no rank has a vote any more has ended before the ranks could agree.

        Ranks: collective.
        Blocks: until the saves under way are complete, and for the manifests of the newest checkpoints.
        """
        attempt.begin()
        with contextlib.suppress(HoldfastError):  # a save that fails is not chosen
            attempt.saves.wait(None)
        ranks = self._components.ranks
        rows = ranks.gather([_row(one) for one in self.unanswered(votes)])
        asked = [
            NamedVote(watch, Vote(Act.GO_BACK, reason, *map(int, numbers)))
            for theirs in rows
            for watch, reason, *numbers in theirs
        ]
        if not asked:
            return
        self._answered |= {(one.watch, one.vote.since) for one in asked}
        watch, vote = asked[0].watch, _merged([one.vote for one in asked])
        # As rows, since a message has no named tuples.
        rows = ranks.of_rank_0(lambda: [tuple(one) for one in self._choose(step, attempt, watch, vote)])
        if not rows:
            return
        choices = tuple(CheckpointId(*row) for row in rows)
        plan = PlannedRollback(watch, vote, step, choices, self._count(choices[0].step))
        if plan.in_a_row > vote.most:
            self._diverge(plan)
        self.planned = plan

    def _choose(self, step: int, attempt: Attempt, watch: str, vote: Vote) -> tuple[CheckpointId, ...]:
        """Return the checkpoints to go back to; none if training continues. On rank 0 only."""
        keeper = attempt.keeper
        assert keeper is not None  # `decide` has begun the attempt
        tiers, upto = self._components.tiers, self._newest_choice(vote)
        stores, newest = tiers.durable_stores(), CheckpointId(attempt=keeper.config.attempt, step=step)
        durable = attempt.latest() or 0
        kept, run_id = min(step, durable) - (self._components.watching.goes_back or 0), keeper.config.run
        steps = {"upto_step": upto, "kept_upto_step": kept}
        choices = Patience(self._components.options.reads.patience_s, self._components.show).spend(
            tiers.home, lambda: find_healthy(stores, newest, attempt.ancestors, run_id=run_id, **steps)
        )
        if not choices:
            text = (
                f"{vote.reason}. There is no healthy checkpoint to go back to, up to step {max(upto, 0)}: "
                "training continues"
            )
            attempt.note("no-rollback", step=vote.since, detail=text)
            _log.warning("%s: %s.", watch.upper(), text)
        return choices

    def _newest_choice(self, vote: Vote) -> int:
        """Return the newest step to go back to: some steps before the trouble.

        If it returns at once, its cause is rather in the data than in the state, which was good before. Then
        training goes back to the same checkpoint, and leaves out more.
        """
        last = self._last
        return vote.upto if last is None or last.base_step >= vote.since else max(vote.upto, last.base_step)

    @property
    def _last(self) -> Rollback | None:
        return self.rollbacks.found[-1] if self.rollbacks.found else None

    def _count(self, step: int) -> int:
        """Return the number of rollbacks in a row, with the one to `step`.

        A healthy checkpoint after the last trouble is progress, and the count begins again. So each series of
        rollbacks ends with a later checkpoint than the one before, and there are only so many.
        """
        last = self._last
        return 1 if last is None or step > last.last_step else last.in_a_row + 1

    def _diverge(self, plan: PlannedRollback) -> NoReturn:
        newest = plan.choices[0]
        reason = f"{plan.vote.reason}, again after {plural(plan.vote.most, 'rollback')} in a row"
        if self._components.ranks.rank == 0:
            report_to_job(JobReport(diverged=plan.last_step, reason=reason[:MAX_PLACE]))
        raise Diverged(
            f"{reason}. Nothing was restored: the newest healthy checkpoint before it is step "
            f"{newest.step} of attempt {newest.attempt} in {self._components.tiers.home}. Look at the "
            "samples of these steps, or lower the learning rate, and start again: a restart resumes from the "
            "newest checkpoint, and restore(healthy=True) from a healthy one. Spike(max_rollbacks=) allows "
            "more rollbacks, and Spike(skip=) leaves out more samples in each.",
            step=plan.last_step,
        )

    def record(
        self,
        config: KeeperConfig,
        plan: PlannedRollback,
        found: Restored,
        ranges: Mapping[str, Range],
        kept: Sequence[str],
    ) -> Rollback:
        """Write the record of a rollback into home, and return it. `config` is of the attempt that ends.

        Ranks: collective.
        Blocks: until it is durable.
        """
        rollback = Rollback(
            run=config.run,
            attempt=config.attempt,
            base_attempt=found.attempt,
            base_step=found.step,
            first_step=plan.vote.since,
            last_step=plan.last_step,
            in_a_row=plan.in_a_row,
            reason=plan.vote.reason[:MAX_REASON_CHARS],
            skipped=dict(list(ranges.items())[:MAX_ROLLBACK_KEYS]),
            kept=tuple(kept[:MAX_ROLLBACK_KEYS]),
            noted_unix_s=time.time(),
        )
        tiers = self._components.tiers
        patience = Patience(self._components.options.reads.patience_s, self._components.show)
        self._components.ranks.of_rank_0(
            lambda: patience.spend(tiers.home, lambda: write_rollback(tiers.durable_stores(), rollback))
        )
        return rollback

    def finish(self, rollback: Rollback) -> None:
        """Note a completed rollback."""
        self.restart(Rollbacks((*self.rollbacks.found, rollback), self.rollbacks.unreadable))

    def restart(self, rollbacks: Rollbacks) -> None:
        """Continue after a restore, with the rollbacks of the run."""
        self.planned, self.rollbacks = None, rollbacks
        self._answered.clear()


def _row(named: NamedVote) -> list[Any]:
    """Return a vote for a message between ranks."""
    vote = named.vote
    return [named.watch, str(vote.reason), *map(int, (vote.since, vote.upto, vote.most, vote.skip))]


def _merged(votes: Sequence[Vote]) -> Vote:
    """Return one vote for those of all ranks, from the lowest rank on: the most cautious numbers."""
    return Vote(
        Act.GO_BACK,
        votes[0].reason,
        since=min(one.since for one in votes),
        upto=min(one.upto for one in votes),
        most=min(one.most for one in votes),
        skip=max(one.skip for one in votes),
    )


def range_to_skip(
    start: int, now: int, skipped: Iterable[Range], *, num_steps: int, in_a_row: int, extra_steps: int
) -> Range:
    """Return the samples that are left out after a rollback.

    With each further rollback in a row the range since the checkpoint doubles: the bad data may be longer
    than the trouble.

    Args:
        start: position of the restored checkpoint.
        now: position at the time of the rollback.
        skipped: ranges that were left out before.
        num_steps: steps from the checkpoint to the rollback.
        in_a_row: rollbacks without progress, with this one.
        extra_steps: steps whose samples are left out beyond.
    """
    if now <= start or num_steps < 1:
        return start, max(start, now)
    joined = _joined(skipped)
    left_out = sum(max(0, min(stop, now) - max(first, start)) for first, stop in joined)
    per_step = (now - start - left_out) / num_steps
    begin = next((first for first, stop in joined if first <= start <= stop), start)  # of the whole range
    again = now - begin if in_a_row > 1 else 0
    return start, now + again + round(extra_steps * per_step)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, those that overlap as one."""
    joined: list[Range] = []
    for first, stop in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((first, stop))
    return joined


def leave_out(
    objects: Mapping[str, Skippable], ranges: Mapping[str, Sequence[Range]], rename: Callable[[str], str]
) -> list[str]:
    """Have the objects of a state skip ranges. Return the keys of ranges that no object can skip.

    The ranges have the keys at the time of their rollback; `rename` returns those of the state.
    """
    unknown: list[str] = []
    for key, some in ranges.items():
        found = objects.get(rename(key))
        if found is None and len(objects) == len(ranges) == 1:
            found = next(iter(objects.values()))  # the only one, under another name
        if found is None:
            unknown.append(key)
            continue
        for start, stop in some:
            try:
                found.skip(start, stop)
            except Exception as error:
                raise InvalidInput(
                    f"{key}: {type(found).__qualname__}.skip({start}, {stop}) failed: {error!r}. A rollback "
                    "left these samples out, so training would see them again. Fix its skip(), or remove "
                    "it from the state.",
                    key=key,
                ) from error
    return unknown


def rewound_streams(rollbacks: Rollbacks, restored: CheckpointId) -> tuple[Rollback, list[str]] | None:
    """Return a rollback whose samples come again after a restore, with their readers."""
    for rollback in rollbacks.found:
        if rollback.kept and restored <= rollback.base:
            return rollback, list(rollback.kept)
    return None


def describe_skipped_samples(skipped: Mapping[str, Range], kept: Sequence[str]) -> str:
    """Return the samples that a rollback leaves out, for people."""
    found = [
        f"samples {start} to {stop - 1} of {key!r}" for key, (start, stop) in skipped.items() if stop > start
    ]
    if found:
        return f"{' and '.join(found)} are left out for ever"
    if kept:
        return f"{', '.join(map(repr, kept))} stayed at its position, so its samples since then are left out"
    return (
        "no object of the state can skip samples: an iterator of the loop continues, and what depends on the "
        "step number or on random numbers comes again"
    )
