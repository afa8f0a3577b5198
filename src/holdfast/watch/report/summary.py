"""Summary of a run: attempts, saves, interruptions, time breakdown and best save interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.home.history import Line, read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.home.rollbacks import read_rollbacks
from holdfast.checkpoint.policy import BestInterval, best_interval, lost_share, mtbf_bounds_s
from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.system.documents import to_plain
from holdfast.watch.hang.incidents import HangIncident, describe_odd, list_hangs
from holdfast.watch.pace.windows import PaceReading, SlowPeriod, list_paces, list_slow_periods
from holdfast.watch.report import interruptions
from holdfast.watch.report.curves import Curve, collect_curves
from holdfast.watch.report.interruptions import AttemptSpan, Interruption, Losses, Span
from holdfast.watch.report.saves import HistoryEvent, SaveRecord, collect_saves, parse_events

ASSUMED_MTBF_S = (3600.0, 4 * 3600.0, 86400.0, 7 * 86400.0)
"""Mean times between failures for the best interval, besides the run's own."""

PROBLEMS = (
    *("failed", "paused", "dropped", "skipped", "fenced", "drain-failed", "retain-failed"),
    *("unhealthy", "spike"),
)
"""Kinds of events that need attention."""


class CheckedNode(Struct, frozen=True):
    """Checks of one node before one attempt of a job."""

    job: int  # number of the job
    attempt: int  # its attempt, which may have another number than that of the run
    node: int  # number of the node
    machine: str  # name of the machine
    unix_s: float  # time of the checks
    num_checks: int  # number of checks
    failures: str  # the checks that failed, for people; empty if none has
    was_refused: bool  # the attempt was not started because of them
    cost_s: float  # time that the commands of the job had to wait; of a refused node, duration of its attempt


class TimeBreakdown(Struct, frozen=True):
    """Time from the first claim to the last event, in seconds. The parts add up to `total_s`."""

    total_s: float
    kept_s: float  # training that counts
    blocked_s: float  # save() during that
    redo_s: float
    down_s: float
    restore_s: float
    idle_s: float

    @property
    def lost_s(self) -> float:
        """Cost of all interruptions."""
        return self.redo_s + self.down_s + self.restore_s

    @property
    def wanted_s(self) -> float:
        """Time that was meant for training."""
        return self.total_s - self.idle_s

    @property
    def goodput(self) -> float | None:
        """Training that counts, as a share of the time that was meant for training; None without any."""
        return self.kept_s / self.wanted_s if self.wanted_s > 0 else None


class IntervalAdvice(Struct, frozen=True):
    """The run's save interval, and the best one."""

    cost_s: float | None  # mean duration of save()
    interval_s: float | None  # mean time from save to save
    step_s: float | None  # median duration of a step
    durable_s: float | None  # median time until durable in the nearest tier; shorter intervals are useless
    up_s: float  # time in which failures could happen
    num_failures: int
    mtbf_s: float | None  # None: without failures it is unknown
    mtbf_bounds_s: tuple[float, float | None]  # with 90 % confidence; None: no upper bound
    own: BestInterval | None
    assumed: tuple[BestInterval, ...]
    lost_share: float | None  # expected for the run's interval; see `save_interval.lost_share`

    @property
    def useful_s(self) -> float | None:
        """Best interval by the run's own failures, at least the time until durable."""
        return None if self.own is None else max(self.own.daly_s, self.durable_s or 0.0)


class HomeContents(Struct, frozen=True):
    """Present contents of home, from a listing."""

    num_bytes: int
    num_checkpoints: int
    newest_step: int | None


class RunSummary(Struct, frozen=True):
    """All data of a report."""

    started_unix_s: float | None  # None: no events yet
    last_unix_s: float | None
    finished: run.Done | None
    attempts: tuple[AttemptSpan, ...]
    saves: tuple[SaveRecord, ...]
    losses: Losses
    times: TimeBreakdown
    overhead_share: float | None  # save() as a share of the attempts' training time
    advice: IntervalAdvice
    problems: tuple[HistoryEvent, ...]
    drains: tuple[HistoryEvent, ...]
    home_contents: HomeContents | None
    num_torn: int
    curves: tuple[Curve, ...] = ()  # training metrics
    hangs: tuple[HangIncident, ...] = ()
    rollbacks: tuple[run.Rollback, ...] = ()
    slow_periods: tuple[tuple[int, SlowPeriod], ...] = ()  # with their attempts
    paces: tuple[PaceReading, ...] = ()
    unhealthy: tuple[HistoryEvent, ...] = ()  # committed checkpoints of states that are not healthy
    differences: tuple[HistoryEvent, ...] = ()  # of the ranks' copies of a tensor
    node_checks: tuple[CheckedNode, ...] = ()  # of the jobs of this user that have trained the run
    lines: tuple[Line, ...] = ()  # of the history, by time

    @property
    def interruptions(self) -> tuple[Interruption, ...]:
        """All interruptions, in order: the one definition that every count of them uses."""
        return self.losses.interruptions

    def cost_after(self, attempt: int) -> float | None:
        """Return the time that the gap after an attempt cost, or None without one."""
        return next((one.cost_s for one in self.losses.gaps if one.before == attempt), None)

    @property
    def end_unix_s(self) -> float | None:
        """Time of the last event. Keepers continue after the last event of their trainers."""
        times = [self.last_unix_s, *(event.unix_s for event in (*self.problems[-1:], *self.drains[-1:]))]
        times += [copy.durable_unix_s for save in self.saves[-100:] for copy in save.copies]
        return max((moment for moment in times if moment is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON members. Infinite and unknown values are null."""
        document = to_plain(self)
        document["interruptions"] = [
            {**to_plain(one), "cost_s": one.cost_s, "is_failure": one.is_failure}
            for one in self.interruptions
        ]
        del document["losses"]["gaps"]
        for row, hang in zip(document["hangs"], self.hangs, strict=True):
            del row["ranks"]
            row["place"] = describe_odd(hang.ranks)
        del document["paces"], document["lines"]  # the history has them
        document["slow_periods"] = [
            {"attempt": attempt, **to_plain(period), "cost_s": period.cost_s}
            for attempt, period in self.slow_periods
        ]
        document["times"]["lost_s"] = self.times.lost_s
        document["advice"]["useful_s"] = self.advice.useful_s
        for row, save in zip(document["saves"], self.saves, strict=True):
            for shown, copy in zip(row["copies"], save.copies, strict=True):
                shown["bytes_per_s"] = copy.bytes_per_s
        return _finite(document)


def read_summary(store: Store, node_checks: Sequence[CheckedNode] = ()) -> RunSummary:
    """Return the summary of the run in a home, with the checks of the jobs that have trained it."""
    lines, num_torn = read_lines(store)
    home = list_home(store)
    claims = {one: _read(store, run.AttemptClaim, names.attempt(one)) for one in home.attempts}
    known = {number: claim for number, claim in claims.items() if claim is not None}
    done = _read(store, run.Done, names.DONE)
    whole, newest = [saved for saved in home.saved.values() if saved.is_committed], candidates(home)
    held = HomeContents(sum(one.num_bytes for one in whole), len(whole), newest[0].step if newest else None)
    found = summarize(parse_events(lines), known, finished=done, home_contents=held, num_torn=num_torn)
    return replace(
        found,
        lines=tuple(lines),
        hangs=tuple(list_hangs(lines)),
        rollbacks=read_rollbacks([store], None).found,
        slow_periods=tuple(list_slow_periods(lines)),
        paces=tuple(list_paces(lines)),
        node_checks=tuple(node_checks),
    )


def _read(store: Store, cls: type[Any], name: str) -> Any:
    """Return a small document, or None if it is missing or unreadable."""
    try:
        return run.parse(cls, store.get(name), name)
    except (Corrupt, NotFound, Unsupported):
        return None


def summarize(
    events: Sequence[HistoryEvent],
    claims: Mapping[int, run.AttemptClaim],
    *,
    finished: run.Done | None = None,
    home_contents: HomeContents | None = None,
    num_torn: int = 0,
) -> RunSummary:
    """Return the summary of a run from its events, by time, and the claims of its attempts, by number."""
    attempts, saves = interruptions.attempt_spans(events, claims), collect_saves(events)
    losses = interruptions.find_losses(attempts, saves, finished=finished.attempt if finished else None)
    began = min((attempt.started_unix_s for attempt in attempts), default=None)
    up_s = sum(one.last_seen_unix_s - one.training_unix_s for one in attempts if one.has_trained)
    # Attempts after the last one that trained have no countable cost yet.
    trained = [attempt for attempt in attempts if attempt.has_trained] or attempts[:1]
    last = max((attempt.last_seen_unix_s for attempt in trained), default=None)

    def of(*kinds: str) -> tuple[HistoryEvent, ...]:
        return tuple(event for event in events if event.kind in kinds)

    return RunSummary(
        began,
        last,
        finished,
        tuple(attempts),
        tuple(saves),
        losses,
        _times(began, last, losses, saves),
        sum(save.blocked_s or 0.0 for save in saves) / up_s if up_s > 0 else None,
        _advise(attempts, saves, losses.interruptions, up_s),
        of(*PROBLEMS),
        of("drained"),
        home_contents,
        num_torn,
        tuple(collect_curves(events, [save.checkpoint_id for save in saves])),
        unhealthy=of("unhealthy"),
        differences=of("replicas-differ"),
    )


def kept_spans(summary: RunSummary) -> list[Span]:
    """Return the time spans of training that counts."""
    if summary.started_unix_s is None or summary.last_unix_s is None:
        return []
    taken = summary.losses.lost
    for span in summary.losses.idle:
        taken.add(*span)
    return taken.add(summary.started_unix_s, summary.last_unix_s)


def _times(
    began: float | None, last: float | None, losses: Losses, saves: Sequence[SaveRecord]
) -> TimeBreakdown:
    total = 0.0 if began is None or last is None else last - began
    lost = losses.lost
    calls = [
        (save.returned_unix_s - save.blocked_s, save.returned_unix_s)
        for save in saves
        if save.returned_unix_s is not None and save.blocked_s
    ]
    blocked_s = interruptions.seconds_of(call for call in calls if not lost.contains(call[0]))
    parts = losses.redone, losses.down, losses.restoring, losses.idle
    others = list(map(interruptions.seconds_of, parts))
    return TimeBreakdown(total, max(0.0, total - blocked_s - sum(others)), blocked_s, *others)


def _advise(
    attempts: Sequence[AttemptSpan],
    saves: Sequence[SaveRecord],
    broken_off: Sequence[Interruption],
    up_s: float,
) -> IntervalAdvice:
    costs = [save.blocked_s for save in saves if save.blocked_s is not None]
    pairs = interruptions.neighbours(attempts, saves)
    gaps = [max(0.0, right.started_unix_s - left.started_unix_s) for left, right in pairs]
    failures = [one for one in broken_off if one.is_failure]
    num_failures = sum(1 + one.num_failed_starts for one in failures)
    cost_s = statistics.fmean(costs) if costs else None
    interval_s = statistics.fmean(gaps) if gaps else None
    mtbf_s = up_s / num_failures if num_failures and up_s > 0 else None
    least, most = mtbf_bounds_s(up_s, num_failures)
    durable = [took_s for save in saves if (took_s := save.durable_s) is not None]
    share = None
    if mtbf_s is not None and cost_s is not None and interval_s:
        share = lost_share(interval_s, cost_s, mtbf_s)
    return IntervalAdvice(
        cost_s=cost_s,
        interval_s=interval_s,
        step_s=interruptions.seconds_per_step(attempts, saves),
        durable_s=statistics.median(durable) if durable else None,
        up_s=up_s,
        num_failures=num_failures,
        mtbf_s=mtbf_s,
        mtbf_bounds_s=(least, most if math.isfinite(most) else None),
        own=None if mtbf_s is None or cost_s is None else best_interval(cost_s, mtbf_s),
        assumed=tuple(
            best for mtbf in ASSUMED_MTBF_S if cost_s is not None and (best := best_interval(cost_s, mtbf))
        ),
        lost_share=share,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value
