"""Problems of the run, with their costs: hangs, slow ranks, rollbacks, failed saves, nodes and copies."""

from __future__ import annotations

import statistics
from itertools import groupby

from holdfast.checkpoint.watch import WatchFigure
from holdfast.system.units import plural
from holdfast.watch.hang.incidents import describe_groups, describe_odd
from holdfast.watch.report import style
from holdfast.watch.report.style import Row, Spec
from holdfast.watch.report.summary import RunSummary

_MAX_RANKS = 64  # in the chart of the pace


def rollbacks(found: RunSummary) -> WatchFigure:
    """Return the figure of the rollbacks."""
    rows: list[Row] = []
    for one in found.rollbacks:
        left_out = [f"samples {start} to {stop - 1} of {key}" for key, (start, stop) in one.skipped.items()]
        left_out += [f"{key} stayed at its position" for key in one.kept]
        steps, cost_s = (one.first_step, one.last_step, one.base_step), found.cost_after(one.attempt)
        rows.append(
            (one.noted_unix_s, one.attempt, *steps, one.in_a_row, cost_s, "; ".join(left_out), one.reason)
        )
    lost = sum(one.last_step - one.base_step for one in found.rollbacks)
    lead = f"{plural(len(rows), 'rollback')}, which lost {plural(lost, 'step')}. "
    return style.make_figure("rollbacks", rows, lead=lead)


def hangs(found: RunSummary) -> WatchFigure:
    """Return the figure of the hangs."""
    rows: list[Row] = []
    for hang in found.hangs:
        end, cost_s = "progress", hang.over_s
        if cost_s is None:
            end, cost_s = "the end of the attempt", found.cost_after(hang.attempt)
        step, stalled_s = min(one.step for one in hang.ranks), max(one.stalled_s for one in hang.ranks)
        place = describe_odd(hang.ranks)
        rows.append((hang.unix_s, hang.attempt, step, len(hang.ranks), stalled_s, end, cost_s, place))
    newest = "\n\n".join(line for hang in found.hangs[-1:] for line in describe_groups(hang.groups))
    lead, note = f"{plural(len(rows), 'hang')}. ", f"\n\nThe newest one:\n\n{newest}"
    return style.make_figure("hangs", rows, lead=lead, note=note)


_SAVE_KINDS = ("failed", "dropped", "skipped", "fenced", "unhealthy")
"""Kinds of events after which a step has no checkpoint that is whole and healthy."""


def problems(found: RunSummary) -> WatchFigure:
    """Return the figure of the problems, each row for neighbours of one kind."""
    rows: list[Row] = []
    for key, some in groupby(found.problems, lambda event: (event.attempt, event.rank, event.kind)):
        events = list(some)
        first, last, cost = events[0], events[-1], None
        if first.kind in _SAVE_KINDS and first.step is not None and last.step is not None:
            before, after = good_steps_around(found, first.attempt, first.step, last.step)
            cost = (
                f"all steps after {before}" if after is None else f"{plural(after - before, 'step')} at risk"
            )
        times = first.unix_s, last.unix_s
        rows.append((*times, *key, len(events), first.step, last.step, cost, last.detail))
    return style.make_figure("problems", rows, lead=f"{plural(len(found.problems), 'problem')}. ")


def good_steps_around(found: RunSummary, attempt: int, first: int, last: int) -> tuple[int, int | None]:
    """Return the steps of the good checkpoints before some steps, else the first one, and after them."""
    sick = {one.step for one in found.unhealthy if one.attempt == attempt}
    good = [
        one.step for one in found.saves if one.attempt == attempt and one.durable and one.step not in sick
    ]
    began = next((one.restored_step or 0 for one in found.attempts if one.number == attempt), 0)
    before = max((step for step in good if step < first), default=began)
    return before, min((step for step in good if step > last), default=None)


def replicas(found: RunSummary) -> WatchFigure:
    """Return the figure of the differences between the copies of ranks."""
    rows: list[Row] = []
    for event in found.differences:
        cost = None
        if event.step is not None:
            before, _ = good_steps_around(found, event.attempt, event.step, event.step)
            cost = f"{plural(event.step - before, 'step')} in doubt"
        rows.append((event.unix_s, event.attempt, event.step, cost, event.detail))
    return style.make_figure("replicas", rows, lead=f"{plural(len(rows), 'difference')}. ")


def nodes(found: RunSummary) -> WatchFigure:
    """Return the figure of the checks of nodes."""
    rows: list[Row] = []
    longest = dict[tuple[int, int], float]()  # wait of each attempt, whose nodes are checked at the same time
    for one in found.node_checks:
        result = "refused" if one.was_refused else "failed" if one.failures else f"{one.num_checks} passed"
        node = one.unix_s, one.job, one.attempt, one.node, one.machine
        rows.append((*node, result, one.cost_s, one.failures or None))
        longest[node[1:3]] = max(longest.get(node[1:3], 0.0), one.cost_s)
    num_failed = sum(bool(one.failures) for one in found.node_checks)
    num_refused = sum(one.was_refused for one in found.node_checks)
    failed = f"{plural(num_failed, 'node')} failed" if num_failed else "All passed"
    refused = f", {num_refused} refused" if num_refused else ""
    lead = f"{failed}{refused}; the job waited {style.format_seconds(sum(longest.values()))}. "
    return style.make_figure("nodes", rows, lead=lead)


def pace(summary: RunSummary) -> WatchFigure | None:
    """Return the figure, or None if ranks were not compared."""
    if not summary.paces:
        return None
    slow = {one.rank for _, one in summary.slow_periods}
    named = " No rank was slow for long."
    if summary.slow_periods:
        _, newest = summary.slow_periods[-1]
        named = (
            f" Slow ranks were named: {len(summary.slow_periods)}. The newest is rank {newest.rank} on "
            f"{newest.host}, which cost all ranks {style.format_share(newest.cost_share)} of their time."
        )
    rows = [
        (
            *(one.since_unix_s, one.until_unix_s, attempt, one.rank, one.host, f"{one.factor:.2f}"),
            *(one.cost_share, one.cost_s, one.cause),
        )
        for attempt, one in summary.slow_periods
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
                share, kind = statistics.fmean(shares), "slow rank" if rank in slow else "other ranks"
                point = {"share": round(share, 4), "rank": rank, "kind": kind}
                values.append({"t": style.to_ms(windows[0].unix_s), **point})
    return values
