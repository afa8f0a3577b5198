"""Attempts of a run, the interruptions between them, and their costs; pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from holdfast.checkpoint.format import run
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.watch.report.saves import METRICS, HistoryEvent, SaveRecord

Span = tuple[float, float]  # start and end, in seconds of one clock


class Spans(Struct):
    """A union of time spans, kept as disjoint stretches in order."""

    stretches: list[Span] = []

    def add(self, begin: float, end: float) -> list[Span]:
        """Add a stretch, and return the parts of it that are new."""
        new: list[Span] = []
        at = begin
        for left, right in self.stretches:
            if at < right and left < end:
                new.append((at, left))
                at = right
        new.append((at, end))
        self.stretches = _union([*self.stretches, (begin, end)])
        return [one for one in new if one[0] < one[1]]

    def contains(self, moment: float) -> bool:
        """Return True if a moment is inside, including the ends."""
        return any(begin <= moment <= end for begin, end in self.stretches)


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(one for one in spans if one[0] < one[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def seconds_of(spans: Iterable[Span]) -> float:
    """Return the length of the union of stretches."""
    return sum((end - begin for begin, end in _union(spans)), 0.0)


_SOURCE = re.compile(r"^attempt \d+(; )?")  # at the start of the detail of a restore
_TRAINERS = ("restored", "saved", "staged", "skipped", "dropped", "ended", "killed", METRICS)
"""Events of the trainer's own process. The keeper's continue after its death, but for "killed"."""


class AttemptSpan(Struct, frozen=True):
    """One attempt. A killed trainer records no end: `last_seen_unix_s` is its last event."""

    number: int
    started_unix_s: float  # its claim, or the save() that made it
    training_unix_s: float  # start of training, after the restore
    last_seen_unix_s: float
    restored_step: int | None  # None: started from scratch
    restore_s: float  # duration of the restore on the slowest rank
    last_step: int  # last recorded step
    has_trained: bool  # False: no event besides its claim
    host: str | None
    num_ranks: int | None
    end: str | None = None  # reason of its end, if recorded
    has_last_step: bool = False  # `last_step` is its newest completed step, not only the last recorded one
    tear_check: str = ""  # method of finding torn copies, from the lowest rank
    remark: str = ""  # of its restore: skipped checkpoints and reasons


def attempt_spans(
    events: Iterable[HistoryEvent], claims: Mapping[int, run.AttemptClaim]
) -> list[AttemptSpan]:
    """Return every attempt with a claim or an event, by number, except imports."""
    by_attempt: dict[int, list[HistoryEvent]] = {number: [] for number in claims}
    for event in events:
        if event.attempt > 0:
            by_attempt.setdefault(event.attempt, []).append(event)
    return [
        _attempt_span(number, own, claims.get(number))
        for number, own in sorted(by_attempt.items())
        if not any(one.kind == "committed" and one.detail.startswith("imported") for one in own)
    ]


def _attempt_span(number: int, events: list[HistoryEvent], claim: run.AttemptClaim | None) -> AttemptSpan:
    # Without a keeper, a save has only the event "persisted"; an import has only a commit.
    trainers = [event for event in events if event.kind in _TRAINERS] or [
        event for event in events if event.kind == "persisted"
    ]
    restored = [event for event in trainers if event.kind == "restored"]
    ended = [event for event in trainers if event.kind == "ended"]
    # Without a restore, the first save() makes the claim.
    starts = [event.unix_s - event.seconds for event in trainers or ([] if claim else events)]
    if claim:
        starts.append(claim.started_unix_s)
    began = min(starts)
    going = max((event.unix_s for event in restored), default=began)
    last_seen = max((event.unix_s for event in trainers), default=going)
    return AttemptSpan(
        number,
        began,
        training_unix_s=max(began, going),
        last_seen_unix_s=max(began, going, last_seen),
        restored_step=restored[0].step if restored else None,
        restore_s=max((event.seconds for event in restored), default=0.0),
        last_step=max((event.step or 0 for event in trainers), default=0),
        has_trained=bool(trainers),
        host=claim.host if claim else None,
        num_ranks=claim.world_size if claim else len({event.rank for event in trainers}) or None,
        end=(ended[0].detail or "ended") if ended else None,
        has_last_step=bool(ended) or any(event.kind == "killed" for event in trainers),
        tear_check=next((event.detail for event in events if event.kind == "tear-check"), ""),
        remark=next(filter(None, (_SOURCE.sub("", event.detail) for event in restored)), ""),
    )


STOPPED, PREEMPTED, WENT_BACK = "stopped", "preempted", "went back"
FINISHED, CLOSED = "finished", "closed"
"""Kinds of interruptions.

Stopped: killed, crashed or ended by hand, which the history does not distinguish. Preempted: after a notice.
Went back: the same process restored an older checkpoint. Finished: the run was complete, and was extended
later. Closed: the program closed it. If an attempt recorded its end, the detail starts with one of these.
"""
_IDLE = (FINISHED, CLOSED)  # not meant to train
# In the detail of a restore.
_SKIPPED = re.compile(r"skipped step ([0-9]{1,19}) of attempt ([0-9]{1,19})(?![0-9])")


class Interruption(Struct, frozen=True):
    """Time between the last event of one attempt and the training of the next one.

    The three times are what this interruption adds to the time lost. Time that an earlier one lost does not
    count again.
    """

    kind: str
    before: int  # attempt
    after: int  # attempt
    num_failed_starts: int  # attempts in between that never trained
    last_seen_unix_s: float
    resumed_unix_s: float
    last_step: int  # last recorded step of the attempt before
    restored_step: int  # 0: from scratch
    steps_lost: int  # recorded: `last_step` - `restored_step`
    max_steps_lost: int | None  # including steps without record; None if the speed is unknown
    redo_s: float  # recorded training that was repeated
    down_s: float  # from the last event to the next claim: unrecorded steps, the outage, process start
    restore_s: float  # from the claim to the start of training
    end: str | None  # recorded end of the attempt before
    remark: str  # of the restore: skipped checkpoints and reasons

    @property
    def cost_s(self) -> float:
        """Time that it added to the time lost."""
        return self.redo_s + self.down_s + self.restore_s

    @property
    def is_failure(self) -> bool:
        """True for a failure, which the best save interval depends on."""
        return self.kind == STOPPED


class Losses(Struct, frozen=True):
    """All gaps between attempts, and the time spans that they cost."""

    gaps: list[Interruption] = []  # between any two attempts that trained, also after a finished run
    redone: list[Span] = []
    down: list[Span] = []
    restoring: list[Span] = []
    idle: list[Span] = []  # between the end of a finished run and its extension

    @property
    def interruptions(self) -> tuple[Interruption, ...]:
        """Gaps that broke off training: not those after a run that was finished or closed."""
        return tuple(one for one in self.gaps if one.kind not in _IDLE)

    @property
    def lost(self) -> Spans:
        """All lost time, without idle time."""
        return Spans(_union([*self.redone, *self.down, *self.restoring]))


def find_losses(
    attempts: Sequence[AttemptSpan], saves: Sequence[SaveRecord], *, finished: int | None
) -> Losses:
    """Return the losses between the attempts, by number; `finished` is the one that finished the run."""
    seen = Spans()  # lost or idle already
    losses = Losses()
    trained = [attempt for attempt in attempts if attempt.has_trained or attempt is attempts[0]]
    step_s = seconds_per_step(attempts, saves)
    for before, after in pairwise(trained):
        kind = _kind(before, finished)
        last_seen = min(before.last_seen_unix_s, after.started_unix_s)
        outage = seen.add(last_seen, after.started_unix_s)
        start = seen.add(after.started_unix_s, after.training_unix_s)
        again = seen.add(_reached_at(before, after, trained, saves), last_seen)
        if kind in _IDLE:
            losses.idle.extend(outage)
            outage = []
        losses.redone.extend(again)
        losses.down.extend(outage)
        losses.restoring.extend(start)
        restored, unseen = after.restored_step or 0, _unseen(before, after, saves, step_s)
        steps_lost = max(0, before.last_step - restored)
        losses.gaps.append(
            Interruption(
                kind=kind,
                before=before.number,
                after=after.number,
                num_failed_starts=sum(before.number < one.number < after.number for one in attempts),
                last_seen_unix_s=before.last_seen_unix_s,
                resumed_unix_s=after.training_unix_s,
                last_step=before.last_step,
                restored_step=restored,
                steps_lost=steps_lost,
                max_steps_lost=None if unseen is None else steps_lost + unseen,
                redo_s=seconds_of(again),
                down_s=seconds_of(outage),
                restore_s=seconds_of(start),
                end=before.end,
                remark=after.remark,
            )
        )
    return losses


def _kind(before: AttemptSpan, finished: int | None) -> str:
    if before.end is not None:
        kinds = (kind for kind in (PREEMPTED, WENT_BACK, *_IDLE) if before.end.startswith(kind))
        return next(kinds, STOPPED)
    return FINISHED if before.number == finished else STOPPED


def _reached_at(
    before: AttemptSpan, after: AttemptSpan, trained: Sequence[AttemptSpan], saves: Sequence[SaveRecord]
) -> float:
    """Return the time when training first reached the step that `after` resumed from."""
    earlier = [attempt for attempt in trained if attempt.number < after.number]
    skipped = _SKIPPED.findall(after.remark)
    damaged = {CheckpointId(attempt=int(attempt), step=int(step)) for step, attempt in skipped}
    sound = (one for one in saves if one.attempt < after.number and one.checkpoint_id not in damaged)
    at_step = [save for save in sound if save.step == after.restored_step]
    whole = [save for save in at_step if save.durable] or at_step
    if whole:
        origin = max(whole, key=lambda save: save.attempt)
        return origin.returned_unix_s or origin.started_unix_s
    # It started from scratch, or from a checkpoint older than the history.
    stood = [attempt.training_unix_s for attempt in earlier if attempt.restored_step == after.restored_step]
    return min(stood, default=before.last_seen_unix_s)


def _unseen(
    before: AttemptSpan, after: AttemptSpan, saves: Sequence[SaveRecord], step_s: float | None
) -> int | None:
    """Return the most steps that `before` may have made after its last event, or None."""
    if before.has_last_step:
        return 0
    if step_s is None or step_s <= 0:
        return None
    in_time = (after.started_unix_s - before.last_seen_unix_s) / step_s
    own = sorted(save.step for save in saves if save.attempt == before.number)
    gaps = [right - left for left, right in pairwise(own)]
    most = min(in_time, max(gaps) - 1) if gaps else in_time
    return max(0, math.ceil(most))


def seconds_per_step(attempts: Sequence[AttemptSpan], saves: Sequence[SaveRecord]) -> float | None:
    """Return the median time of a step between saves, without save(), or None."""
    paces = [
        (right.started_unix_s - (left.returned_unix_s or left.started_unix_s)) / (right.step - left.step)
        for left, right in neighbours(attempts, saves)
        if right.started_unix_s > (left.returned_unix_s or left.started_unix_s)
    ]
    return statistics.median(paces) if paces else None


def neighbours(
    attempts: Sequence[AttemptSpan], saves: Sequence[SaveRecord]
) -> Iterator[tuple[SaveRecord, SaveRecord]]:
    """Yield the saves of each attempt with the next ones."""
    for attempt in attempts:
        own = sorted((save for save in saves if save.attempt == attempt.number), key=lambda save: save.step)
        yield from pairwise(own)
