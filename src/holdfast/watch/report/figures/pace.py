"""Own time of each rank over time, and the ranks that all others waited for."""

from __future__ import annotations

import statistics

from holdfast.watch.pace.slow_periods import SlowAttempt
from holdfast.watch.report import style
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary

_SLOW, _USUAL = "slow rank", "other ranks"
_MAX_RANKS = 64


def pace(summary: RunSummary) -> Figure | None:
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
    looks = {_SLOW: style.REDO, _USUAL: style.KEPT} if slow else {_USUAL: style.KEPT}
    chart = {
        "shares": _values(summary, slow),
        "time": style.time_axis("t", summary),
        "stroke": style.color_by("kind", looks),
    }
    return style.make_figure("pace", [_row(one) for one in summary.slow_periods], note=named, chart=chart)


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
                share, kind = round(statistics.fmean(shares), 4), _SLOW if rank in slow else _USUAL
                values.append(
                    {"t": style.to_ms(windows[0].unix_s), "share": share, "rank": rank, "kind": kind}
                )
    return values


def _row(one: SlowAttempt) -> tuple[object, ...]:
    of = one.period
    times, costs = (of.since_unix_s, of.until_unix_s), (of.cost_share, of.cost_s)
    return (*times, one.attempt, of.rank, of.host, f"{of.factor:.2f}", *costs, of.cause)
