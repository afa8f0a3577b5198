"""The story of a run: attempts, saves, interruptions, where its time went, and what would have been best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.format import names, run
from holdfast.report.attempts import Life, lives_of
from holdfast.report.curves import Curve, curves_of
from holdfast.report.events import MEMORY, Event, events_of, read_lines
from holdfast.report.interruptions import Interruption, Losses, find_losses, intervals_s, seconds_per_step
from holdfast.report.interval import Best, best, lost_share, mtbf_bounds_s
from holdfast.report.saves import Save, saves_of
from holdfast.report.spans import Span, seconds_of
from holdfast.report.tiers import Level, levels_of
from holdfast.restore.find import candidates, list_home
from holdfast.store import Store

ASSUMED_MTBF_S = (3600.0, 4 * 3600.0, 86400.0, 7 * 86400.0)
"""Mean times between failures that the best interval is shown for, beside the run's own."""

TROUBLE = ("failed", "dropped", "skipped", "fenced", "drain-failed", "retain-failed")
"""Events that somebody should look at."""


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time went, in seconds, from first claim to last sign. The parts add up to `total_s`."""

    total_s: float
    kept_s: float  # training whose result stands
    blocked_s: float  # save() in that
    redo_s: float
    down_s: float
    restore_s: float
    idle_s: float

    @property
    def lost_s(self) -> float:
        """What interruptions cost."""
        return self.redo_s + self.down_s + self.restore_s


@dataclass(frozen=True, slots=True)
class Advice:
    """How often the run saved, and how often it should have."""

    cost_s: float | None  # what a save took from the loop, on average
    interval_s: float | None  # from save to save, on average
    step_s: float | None  # a step, median
    durable_s: float | None  # from save() to durable in the nearest tier, median: more often is no use
    restart_s: float  # from a failure's last sign until training went again, on average
    up_s: float  # time in which failures could happen
    num_failures: int
    mtbf_s: float | None  # None: without a failure it cannot be known
    mtbf_bounds_s: tuple[float, float | None]  # 90 % sure; None: no upper bound
    own: Best | None
    assumed: tuple[Best, ...]
    lost_share: float | None  # expected for the interval that the run had; see `interval.lost_share`

    @property
    def useful_s(self) -> float | None:
        """The best interval by the run's own failures, but not less than a save takes to be durable."""
        return None if self.own is None else max(self.own.daly_s, self.durable_s or 0.0)


@dataclass(frozen=True, slots=True)
class Holding:
    """What home holds now, by a listing."""

    num_bytes: int
    num_checkpoints: int
    newest_step: int | None


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that a report tells."""

    began_unix_s: float | None  # None: nothing has happened yet
    last_unix_s: float | None
    finished: run.Done | None
    lives: tuple[Life, ...]
    saves: tuple[Save, ...]
    losses: Losses
    times: Times
    overhead_share: float | None  # save() as a share of the time that attempts trained
    advice: Advice
    levels: tuple[Level, ...]
    trouble: tuple[Event, ...]
    drains: tuple[Event, ...]
    holding: Holding | None
    num_torn: int
    curves: tuple[Curve, ...] = ()  # what training told of itself

    @property
    def interruptions(self) -> tuple[Interruption, ...]:
        """All of them, in order."""
        return self.losses.interruptions

    @property
    def end_unix_s(self) -> float | None:
        """The last moment that it tells of: keepers go on after the last sign of their trainers."""
        told = [self.last_unix_s, *(level.unix_s for level in self.levels[-1:])]
        told += [event.unix_s for event in (*self.trouble[-1:], *self.drains[-1:])]
        told += [copy.durable_unix_s for save in self.saves[-100:] for copy in save.copies]
        return max((moment for moment in told if moment is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON members; what is infinite or unknown is null."""
        document = asdict(self)
        document["interruptions"] = [
            {**asdict(one), "cost_s": one.cost_s, "is_failure": one.is_failure} for one in self.interruptions
        ]
        del document["losses"]["interruptions"]
        document["times"]["lost_s"] = self.times.lost_s
        document["advice"]["useful_s"] = self.advice.useful_s
        for told, save in zip(document["saves"], self.saves, strict=True):
            for shown, copy in zip(told["copies"], save.copies, strict=True):
                shown["bytes_per_s"] = copy.bytes_per_s
        return _finite(document)


def read_story(store: Store) -> Story:
    """The story of the run in a home.

    Raises:
        RetryLater: the store failed.
    """
    lines, num_torn = read_lines(store)
    home = list_home(store)
    claims: dict[int, run.Attempt] = {}
    for number in home.attempts:
        claim = _read(store, run.Attempt, names.attempt(number))
        if claim is not None:
            claims[number] = claim
    whole = [saved for saved in home.saved.values() if saved.is_committed]
    newest = candidates(home)
    return tell(
        events_of(lines),
        claims,
        finished=_read(store, run.Done, names.DONE),
        holding=Holding(
            sum(saved.num_bytes for saved in whole), len(whole), newest[0][1] if newest else None
        ),
        num_torn=num_torn,
    )


def _read(store: Store, cls: type[Any], name: str) -> Any:
    """A small document; None if there is none or it cannot be read, which takes nothing else away."""
    try:
        return run.parse(cls, store.get(name), name)
    except (Corrupt, NotFound, Unsupported):
        return None


def tell(
    events: Sequence[Event],
    claims: Mapping[int, run.Attempt],
    *,
    finished: run.Done | None = None,
    holding: Holding | None = None,
    num_torn: int = 0,
) -> Story:
    """The story that events tell.

    Args:
        events: of the whole run, by time.
        claims: the attempts' claims by number.
        finished: the done marker.
        holding: what home holds now.
        num_torn: lines of the history that could not be read.
    """
    lives, saves = lives_of(events, claims), saves_of(events)
    losses = find_losses(lives, saves, finished=finished.attempt if finished else None)
    began = min((life.began_unix_s for life in lives), default=None)
    # Starts after the last one that trained have cost nothing yet that could be counted.
    trained = [life for life in lives if life.has_trained] or lives[:1]
    last = max((life.last_seen_unix_s for life in trained), default=None)
    return Story(
        began,
        last,
        finished,
        tuple(lives),
        tuple(saves),
        losses,
        _times(began, last, losses, saves),
        _overhead(lives, saves),
        _advise(lives, saves, losses.interruptions),
        tuple(levels_of(events, saves)),
        tuple(event for event in events if event.kind in TROUBLE),
        tuple(event for event in events if event.kind == "drained"),
        holding,
        num_torn,
        tuple(curves_of(events, [(save.attempt, save.step) for save in saves])),
    )


def kept_spans(story: Story) -> list[Span]:
    """The stretches of training whose result stands."""
    if story.began_unix_s is None or story.last_unix_s is None:
        return []
    taken = story.losses.lost
    for span in story.losses.idle:
        taken.add(*span)
    return taken.add(story.began_unix_s, story.last_unix_s)


def _times(began: float | None, last: float | None, losses: Losses, saves: Sequence[Save]) -> Times:
    total = 0.0 if began is None or last is None else last - began
    lost = losses.lost
    calls = [
        (save.back_unix_s - save.blocked_s, save.back_unix_s)
        for save in saves
        if save.back_unix_s is not None and save.blocked_s
    ]
    blocked_s = seconds_of(call for call in calls if not lost.holds(call[0]))
    redo_s, down_s, restore_s, idle_s = map(
        seconds_of, (losses.redone, losses.down, losses.restoring, losses.idle)
    )
    kept_s = max(0.0, total - blocked_s - redo_s - down_s - restore_s - idle_s)
    return Times(total, kept_s, blocked_s, redo_s, down_s, restore_s, idle_s)


def _overhead(lives: Iterable[Life], saves: Iterable[Save]) -> float | None:
    up_s = _up_s(lives)
    return sum(save.blocked_s or 0.0 for save in saves) / up_s if up_s > 0 else None


def _up_s(lives: Iterable[Life]) -> float:
    """Time in which attempts trained, as far as they told."""
    return sum(life.last_seen_unix_s - life.going_unix_s for life in lives if life.has_trained)


def _advise(lives: Sequence[Life], saves: Sequence[Save], interruptions: Sequence[Interruption]) -> Advice:
    costs = [save.blocked_s for save in saves if save.blocked_s is not None]
    gaps = intervals_s(lives, saves)
    failures = [one for one in interruptions if one.is_failure]
    num_failures = sum(1 + one.num_dead_starts for one in failures)
    up_s = _up_s(lives)
    cost_s = statistics.fmean(costs) if costs else None
    interval_s = statistics.fmean(gaps) if gaps else None
    restart_s = statistics.fmean(one.down_s + one.restore_s for one in failures) if failures else 0.0
    mtbf_s = up_s / num_failures if num_failures and up_s > 0 else None
    least, most = mtbf_bounds_s(up_s, num_failures)
    durable = [took_s for save in saves if (took_s := _durable_s(save)) is not None]
    share = None
    if mtbf_s is not None and cost_s is not None and interval_s:
        share = lost_share(interval_s, cost_s, mtbf_s)
    return Advice(
        cost_s=cost_s,
        interval_s=interval_s,
        step_s=seconds_per_step(lives, saves),
        durable_s=statistics.median(durable) if durable else None,
        restart_s=restart_s,
        up_s=up_s,
        num_failures=num_failures,
        mtbf_s=mtbf_s,
        mtbf_bounds_s=(least, most if math.isfinite(most) else None),
        own=None if mtbf_s is None or cost_s is None else best(cost_s, mtbf_s),
        assumed=tuple(one for mtbf in ASSUMED_MTBF_S if cost_s is not None and (one := best(cost_s, mtbf))),
        lost_share=share,
    )


def _durable_s(save: Save) -> float | None:
    """From save() until it was durable in the nearest tier that outlives its host's processes."""
    found = (copy.durable_s for copy in save.copies if copy.tier != MEMORY and copy.durable_s is not None)
    return next(found, None)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value
