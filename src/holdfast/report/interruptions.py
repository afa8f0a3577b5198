"""What lay between the attempts of a run, and what each interruption cost; pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.report.attempts import Life
from holdfast.report.saves import Save
from holdfast.report.spans import Span, Spans, seconds_of

STOPPED, PREEMPTED, WENT_BACK = "stopped", "preempted", "went back"
FINISHED, CLOSED = "finished", "closed"
"""How an attempt came to be followed by another one.

Stopped: killed, crashed or ended by hand, which the history does not tell apart. Preempted: after a notice.
Went back: the same process restored an older checkpoint. Finished: the run was done, and was then made
longer. Closed: a person ended it. An attempt that could tell how it ended says one of these words first.
"""
_IDLE = (FINISHED, CLOSED)  # nobody wanted it to train
_PASSED_OVER = re.compile(
    r"passed over step ([0-9]{1,19}) of attempt ([0-9]{1,19})(?![0-9])"
)  # in what a restore tells


@dataclass(frozen=True, slots=True)
class Interruption:
    """From the last sign of one attempt until the next one trained.

    The three times are what this interruption adds to the time lost: what an earlier one has cost already
    is not counted again.
    """

    kind: str
    before: int  # attempt
    after: int  # attempt
    num_dead_starts: int  # attempts in between that never came to train
    last_seen_unix_s: float
    back_unix_s: float
    last_step: int  # the last step known of the attempt before
    restored_step: int  # 0: from nothing
    steps_lost: int  # known: `last_step` - `restored_step`
    steps_lost_most: int | None  # with those that may have followed unseen; None if the pace is not known
    redo_s: float  # training known to be done again
    down_s: (
        float  # from the last sign to the next claim: unseen steps, the outage, the start of the processes
    )
    restore_s: float  # from the claim until training went again
    end: str | None  # what the attempt before said of its end
    remark: str  # of the restore: what it passed over, and why

    @property
    def cost_s(self) -> float:
        """Time that it added to the time lost."""
        return self.redo_s + self.down_s + self.restore_s

    @property
    def is_failure(self) -> bool:
        """True if training was thrown back by it, or may have been: what the best interval depends on."""
        return self.kind == STOPPED


@dataclass(frozen=True, slots=True)
class Losses:
    """All interruptions, with the stretches of time that they cost."""

    interruptions: tuple[Interruption, ...]
    redone: tuple[Span, ...]
    down: tuple[Span, ...]
    restoring: tuple[Span, ...]
    idle: tuple[Span, ...]  # between the end of a finished run and its being made longer

    @property
    def lost(self) -> Spans:
        """All of it but idle time."""
        lost = Spans()
        for span in (*self.redone, *self.down, *self.restoring):
            lost.add(*span)
        return lost


def find_losses(lives: Sequence[Life], saves: Sequence[Save], *, finished: int | None) -> Losses:
    """What was lost between the attempts.

    Args:
        lives: by number.
        saves: of the whole run.
        finished: the attempt that finished the run, if one did.
    """
    seen = Spans()  # lost or idle already
    found: list[Interruption] = []
    redone: list[Span] = []
    down: list[Span] = []
    restoring: list[Span] = []
    idle: list[Span] = []
    trained = [life for life in lives if life.has_trained or life is lives[0]]
    step_s = seconds_per_step(lives, saves)
    for before, after in pairwise(trained):
        kind = _kind(before, after, saves, finished)
        last_seen = min(before.last_seen_unix_s, after.began_unix_s)
        outage = seen.add(last_seen, after.began_unix_s)
        start = seen.add(after.began_unix_s, after.going_unix_s)
        again = seen.add(_passed_at(before, after, trained, saves), last_seen)
        if kind in _IDLE:
            idle += outage
            outage = []
        redone += again
        down += outage
        restoring += start
        found.append(
            _interruption(
                kind, before, after, lives, (again, outage, start), _unseen(before, after, saves, step_s)
            )
        )
    return Losses(tuple(found), tuple(redone), tuple(down), tuple(restoring), tuple(idle))


def _interruption(
    kind: str,
    before: Life,
    after: Life,
    lives: Sequence[Life],
    spans: tuple[list[Span], list[Span], list[Span]],
    unseen: int | None,
) -> Interruption:
    restored = after.restored_step or 0
    steps_lost = max(0, before.last_step - restored)
    return Interruption(
        kind=kind,
        before=before.number,
        after=after.number,
        num_dead_starts=sum(before.number < life.number < after.number for life in lives),
        last_seen_unix_s=before.last_seen_unix_s,
        back_unix_s=after.going_unix_s,
        last_step=before.last_step,
        restored_step=restored,
        steps_lost=steps_lost,
        steps_lost_most=None if unseen is None else steps_lost + unseen,
        redo_s=seconds_of(spans[0]),
        down_s=seconds_of(spans[1]),
        restore_s=seconds_of(spans[2]),
        end=before.end,
        remark=after.remark,
    )


def _kind(before: Life, after: Life, saves: Sequence[Save], finished: int | None) -> str:
    if before.end is not None:
        told = (kind for kind in (PREEMPTED, WENT_BACK, *_IDLE) if before.end.startswith(kind))
        return next(told, STOPPED)
    if before.number == finished:
        return FINISHED
    # In a container every process has the same id: only what was restored tells a restart from going back.
    same_process = before.pid is not None and (before.host, before.pid) == (after.host, after.pid)
    newest = max((one.step for one in saves if one.attempt == before.number and one.durable), default=None)
    chose_older = (
        newest is not None and (after.restored_step or 0) < newest and not _PASSED_OVER.search(after.remark)
    )
    return WENT_BACK if same_process and chose_older else STOPPED


def _passed_at(before: Life, after: Life, trained: Sequence[Life], saves: Sequence[Save]) -> float:
    """When training first stood where `after` goes on from: all since is lost, now or already."""
    earlier = [life for life in trained if life.number < after.number]
    damaged = {(int(attempt), int(step)) for step, attempt in _PASSED_OVER.findall(after.remark)}
    at_step = [
        save
        for save in saves
        if save.step == after.restored_step
        and save.attempt < after.number
        and (save.attempt, save.step) not in damaged
    ]
    whole = [save for save in at_step if save.durable] or at_step
    if whole:
        origin = max(whole, key=lambda save: save.attempt)
        return origin.back_unix_s or origin.began_unix_s
    # It went on from nothing, or its checkpoint was saved before the history began.
    stood = [life.going_unix_s for life in earlier if life.restored_step == after.restored_step]
    return min(stood, default=before.last_seen_unix_s)


def _unseen(before: Life, after: Life, saves: Sequence[Save], step_s: float | None) -> int | None:
    """How many steps `before` may have done after its last sign: fewer than until its next save."""
    if before.end is not None:
        return 0
    if step_s is None or step_s <= 0:
        return None
    in_time = (after.began_unix_s - before.last_seen_unix_s) / step_s
    own = sorted(save.step for save in saves if save.attempt == before.number)
    gaps = [right - left for left, right in pairwise(own)]
    most = min(in_time, max(gaps) - 1) if gaps else in_time
    return max(0, math.ceil(most))


def seconds_per_step(lives: Sequence[Life], saves: Sequence[Save]) -> float | None:
    """The median time of a step between two saves of one attempt, without save(); None without such."""
    paces = [
        (right.began_unix_s - (left.back_unix_s or left.began_unix_s)) / (right.step - left.step)
        for left, right in _neighbours(lives, saves)
        if right.began_unix_s > (left.back_unix_s or left.began_unix_s)
    ]
    return statistics.median(paces) if paces else None


def _neighbours(lives: Sequence[Life], saves: Sequence[Save]) -> Iterator[tuple[Save, Save]]:
    for life in lives:
        own = sorted((save for save in saves if save.attempt == life.number), key=lambda save: save.step)
        yield from pairwise(own)


def intervals_s(lives: Sequence[Life], saves: Sequence[Save]) -> list[float]:
    """Times from each save to the next one of the same attempt, in seconds."""
    return [max(0.0, right.began_unix_s - left.began_unix_s) for left, right in _neighbours(lives, saves)]
