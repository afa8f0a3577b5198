"""Problems of the run, with their costs: hangs, slow ranks, rollbacks, failed saves, nodes and copies."""

from __future__ import annotations

import statistics
from itertools import groupby

from holdfast.checkpoint.format.run import Rollback
from holdfast.checkpoint.watch import WatchFigure
from holdfast.system.units import plural
from holdfast.watch.hang.incidents import HangIncident, describe_groups, describe_odd
from holdfast.watch.report import style
from holdfast.watch.report.events import HistoryEvent
from holdfast.watch.report.style import Row, Spec
from holdfast.watch.report.summary import CheckedNode, RunSummary

_MAX_RANKS = 64  # in the chart of the pace


def rollbacks(found: RunSummary) -> WatchFigure | None:
    """Return the figure, or None without rollbacks."""
    if not found.rollbacks:
        return None
    lost = sum(one.last_step - one.base_step for one in found.rollbacks)
    count = f"{plural(len(found.rollbacks), 'rollback')}, which lost {plural(lost, 'step')}. "
    return style.make_figure("rollbacks", [_rollback_row(found, one) for one in found.rollbacks], lead=count)


def _rollback_row(found: RunSummary, rollback: Rollback) -> Row:
    left_out = [f"samples {start} to {stop - 1} of {key}" for key, (start, stop) in rollback.skipped.items()]
    left_out += [f"{key} stayed at its position" for key in rollback.kept]
    steps = rollback.first_step, rollback.last_step, rollback.base_step
    facts = rollback.in_a_row, found.cost_after(rollback.attempt), "; ".join(left_out), rollback.reason
    return (rollback.noted_unix_s, rollback.attempt, *steps, *facts)


def hangs(found: RunSummary) -> WatchFigure | None:
    """Return the figure, or None without hangs."""
    if not found.hangs:
        return None
    newest = "\n\n".join(describe_groups(found.hangs[-1].groups))
    return style.make_figure(
        "hangs",
        [_hang_row(found, hang) for hang in found.hangs],
        lead=f"{plural(len(found.hangs), 'hang')}. ",
        note=f"\n\nThe newest one:\n\n{newest}",
    )


def _hang_row(found: RunSummary, hang: HangIncident) -> Row:
    step, stalled_s = min(rank.step for rank in hang.ranks), max(rank.stalled_s for rank in hang.ranks)
    end, cost_s = "progress", hang.over_s
    if hang.over_s is None:
        end, cost_s = "the end of the attempt", found.cost_after(hang.attempt)
    place = describe_odd(hang.ranks)
    return (hang.unix_s, hang.attempt, step, len(hang.ranks), stalled_s, end, cost_s, place)


_SAVE_KINDS = ("failed", "dropped", "skipped", "fenced", "unhealthy")
"""Kinds of events after which a step has no checkpoint that is whole and healthy."""


def problems(found: RunSummary) -> WatchFigure | None:
    """Return the figure, or None without problems."""
    if not found.problems:
        return None
    rows = [
        _row(found, list(some))
        for _, some in groupby(found.problems, lambda event: (event.attempt, event.kind, event.rank))
    ]
    return style.make_figure("problems", rows, lead=f"{plural(len(found.problems), 'problem')}. ")


def _row(found: RunSummary, some: list[HistoryEvent]) -> Row:
    first, last = some[0], some[-1]
    cost = _cost(found, first, last) if first.kind in _SAVE_KINDS else None
    kind = first.attempt, first.rank, first.kind
    return (first.unix_s, last.unix_s, *kind, len(some), first.step, last.step, cost, last.detail)


def _cost(found: RunSummary, first: HistoryEvent, last: HistoryEvent) -> str | None:
    """Return the steps between the good checkpoints around some events, as the largest possible loss."""
    if first.step is None or last.step is None:
        return None
    before, after = good_steps_around(found, first.attempt, first.step, last.step)
    if after is None:
        return f"all steps after {before}"
    return f"{plural(after - before, 'step')} at risk"


def good_steps_around(found: RunSummary, attempt: int, first: int, last: int) -> tuple[int, int | None]:
    """Return the steps of the good checkpoints before some steps, else the first one, and after them."""
    sick = {one.step for one in found.unhealthy if one.attempt == attempt}
    good = [
        one.step for one in found.saves if one.attempt == attempt and one.durable and one.step not in sick
    ]
    began = next((one.restored_step or 0 for one in found.attempts if one.number == attempt), 0)
    before = max((step for step in good if step < first), default=began)
    return before, min((step for step in good if step > last), default=None)


def replicas(found: RunSummary) -> WatchFigure | None:
    """Return the figure, or None without differences."""
    if not found.differences:
        return None
    rows = [_difference_row(found, event) for event in found.differences]
    return style.make_figure("replicas", rows, lead=f"{plural(len(rows), 'difference')}. ")


def _difference_row(found: RunSummary, event: HistoryEvent) -> Row:
    cost = None
    if event.step is not None:
        before, _ = good_steps_around(found, event.attempt, event.step, event.step)
        cost = f"{plural(event.step - before, 'step')} in doubt"
    return event.unix_s, event.attempt, event.step, cost, event.detail


def nodes(found: RunSummary) -> WatchFigure | None:
    """Return the figure, or None without checks."""
    checks = found.node_checks
    if not checks:
        return None
    num_failed = sum(bool(one.failures) for one in checks)
    num_refused = sum(one.was_refused for one in checks)
    failed = f"{plural(num_failed, 'node')} failed" if num_failed else "All passed"
    refused = f", {num_refused} refused" if num_refused else ""
    longest = dict[tuple[int, int], float]()  # wait of each attempt, whose nodes are checked at the same time
    for check in checks:
        attempt = check.job, check.attempt
        longest[attempt] = max(longest.get(attempt, 0.0), check.cost_s)
    waited = style.format_seconds(sum(longest.values()))
    lead = f"{failed}{refused}; the job waited {waited}. "
    return style.make_figure("nodes", [_node_row(one) for one in checks], lead=lead)


def _node_row(check: CheckedNode) -> Row:
    result = "refused" if check.was_refused else "failed" if check.failures else f"{check.num_checks} passed"
    node = check.unix_s, check.job, check.attempt, check.node, check.machine
    return (*node, result, check.cost_s, check.failures or None)


def pace(summary: RunSummary) -> WatchFigure | None:
    """Return the figure, or None if ranks were not compared."""
    if not summary.paces:
        return None
    slow = {one.period.rank for one in summary.slow_periods}
    named = " No rank was slow for long."
    if summary.slow_periods:
        newest = summary.slow_periods[-1].period
        named = (
            f" Slow ranks were named: {len(summary.slow_periods)}. The newest is rank {newest.rank} on "
            f"{newest.host}, which cost all ranks {style.format_share(newest.cost_share)} of their time."
        )
    rows = [
        (
            *(one.since_unix_s, one.until_unix_s, attempt, one.rank, one.host, f"{one.factor:.2f}"),
            *(one.cost_share, one.cost_s, one.cause),
        )
        for attempt, one in ((slow.attempt, slow.period) for slow in summary.slow_periods)
    ]
    chart = {"shares": _values(summary, slow), "time": style.time_axis("t", summary)}
    return style.make_figure("pace", rows, note=named, chart=chart)


def _values(summary: RunSummary, slow: set[int]) -> list[Spec]:
    """Return the points of the chart: of the slow ranks, and of some others."""
    ranks = sorted({rank for one in summary.paces for rank in one.shares})
    drawn = set(sorted(ranks, key=lambda rank: rank not in slow)[:_MAX_RANKS])
    most = max(1, style.MAX_MARKS // max(1, len(drawn)))
    size = -(-len(summary.paces) // most) or 1  # neighbours that are drawn as one point
    values: list[Spec] = []
    for first in range(0, len(summary.paces), size):
        windows = summary.paces[first : first + size]
        for rank in sorted(drawn):
            shares = [one.shares[rank] for one in windows if rank in one.shares]
            if shares:
                share, kind = (
                    round(statistics.fmean(shares), 4),
                    "slow rank" if rank in slow else "other ranks",
                )
                values.append(
                    {"t": style.to_ms(windows[0].unix_s), "share": share, "rank": rank, "kind": kind}
                )
    return values
