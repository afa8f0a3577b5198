"""Durations of saves, and the best interval between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from holdfast.checkpoint.policy import BestInterval, lost_share
from holdfast.checkpoint.watch import WatchFigure
from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.saves import TIERS, SaveRecord
from holdfast.watch.report.style import Row, Spec
from holdfast.watch.report.summary import IntervalAdvice, RunSummary

_POINTS = 80


def durations(summary: RunSummary) -> WatchFigure:
    """Return the figure of the duration of each save."""
    saves, note = style.thin_out(summary.saves, "saves")
    values = [
        {"t": style.to_ms(one.started_unix_s), "s": s, "what": what, "step": one.step, "took": took}
        for one in saves
        for what, s in (
            ("save() blocked the loop", one.blocked_s),
            ("staged after", one.staged_s),
            *((f"durable in {copy.tier} after", copy.durable_s) for copy in one.copies if copy.tier in TIERS),
        )
        if s and (took := style.format_seconds(s))
    ]
    chart = None
    if values:
        shortest, longest = min(one["s"] for one in values), max(one["s"] for one in values)
        low, high = 10.0 ** math.floor(math.log10(shortest)), 10.0 ** math.ceil(math.log10(longest))
        chart = {
            "points": values,
            "time": style.time_axis("t", summary),
            "domain": [low, high if high > low else low * 10],
            "ticks": style.span_log_ticks(low, high),
        }
    return style.make_figure("durations", list(_duration_rows(summary.saves)), note=note, chart=chart)


def _duration_rows(saves: Iterable[SaveRecord]) -> Iterator[Row]:
    for save in saves:
        facts = save.started_unix_s, save.attempt, save.step, save.num_bytes, save.blocked_s, save.staged_s
        for copy in save.copies:
            speed = f"{style.format_size(copy.bytes_per_s)}/s" if copy.bytes_per_s else None
            written, durable = style.format_seconds(copy.write_s), style.format_seconds(copy.durable_s)
            outcome = save.outcome if copy.durable_unix_s is None else "durable"
            yield (*facts, copy.tier, written, speed, durable, outcome)
        if not save.copies:
            yield (*facts, None, None, None, None, save.outcome)


def intervals(summary: RunSummary) -> WatchFigure | None:
    """Return the figure of the cost of saving and failing at every interval; None without a cost."""
    advice = summary.advice
    if advice.cost_s is None:
        return None
    bests = [advice.own] if advice.own else list(advice.assumed)
    lead, chart = f"{_verdict(advice)}\n\n", _interval_chart(advice, bests) if bests else None
    return style.make_figure("intervals", _interval_rows(advice), lead=lead, chart=chart)


def _verdict(advice: IntervalAdvice) -> str:
    lower_s, upper_s = advice.mtbf_bounds_s
    own_s = ""
    if advice.interval_s:
        own_s = f"It saved every {style.format_seconds(advice.interval_s)} on average. "
    if advice.own is None:
        up = f" in {style.format_seconds(advice.up_s)} of training"
        has_bound = advice.up_s > 0
        bound = f" With 95 % confidence it is more than {style.format_seconds(lower_s)}." * has_bound
        return (
            f"{own_s}There was no failure{up}, so the mean time between failures is unknown, and with it the "
            f"best interval.{bound} The chart shows the best interval for several assumed values."
        )
    own, mtbf = advice.own, style.format_seconds(advice.mtbf_s)
    bounds = ""
    if upper_s is not None:
        bounds = f" (90 % confidence: {style.format_seconds(lower_s)} to {style.format_seconds(upper_s)})"
    verdict = (
        f"{own_s}Daly's best interval is {style.format_seconds(own.daly_s)}, Young's "
        f"{style.format_seconds(own.young_s)}, for a mean time between failures of {mtbf}{bounds}, from "
        f"{plural(advice.num_failures, 'failure')} in {style.format_seconds(advice.up_s)} of training."
    )
    if advice.lost_share is not None and math.isfinite(advice.lost_share):
        verdict += (
            f" Expected loss to saving and failing: {style.format_share(advice.lost_share)} of training at "
            f"the run's interval, {style.format_share(own.lost_share)} at the best one. Restarts come on top."
        )
    if advice.durable_s is not None and own.daly_s < advice.durable_s:
        verdict += (
            f" A save takes {style.format_seconds(advice.durable_s)} to be durable in the nearest tier, so "
            "shorter intervals are useless: save as soon as the last save is durable."
        )
    return verdict


def _interval_chart(advice: IntervalAdvice, bests: list[BestInterval]) -> Spec | None:
    names = [f"failures every {style.format_seconds(best.mtbf_s)}" for best in bests]
    middle = [best.daly_s for best in bests] + ([advice.interval_s] if advice.interval_s else [])
    low, high = max(1e-4, min(middle) / 12), max(middle) * 12
    values: list[Spec] = []
    for name, best in zip(names, bests, strict=True):
        for i in range(_POINTS):
            at = low * (high / low) ** (i / (_POINTS - 1))
            lost = lost_share(at, advice.cost_s or 0.0, best.mtbf_s)
            if 0 < lost < 100:  # beyond that, training hardly progresses
                values.append({"at": at, "lost": lost, "which": name})
    if not values:
        return None
    least, most = min(one["lost"] for one in values) / 2.5, max(one["lost"] for one in values) * 1.2
    own_s = advice.interval_s
    is_right = own_s is not None and own_s > math.sqrt(low * high)  # the label is on the side with room
    side = {"align": "right", "dx": -4} if is_right else {"align": "left", "dx": 4}
    return {
        "curves": values,
        "x_domain": [low, high],
        "x_ticks": style.span_log_ticks(low, high),
        "y_domain": [least, most],
        "y_ticks": style.log_ticks(least, most),
        "own": [{"at": own_s, "name": f"actual: {style.format_seconds(own_s)}"}] if own_s else [],
        "own_label": {"type": "text", **side, "dy": 6, "y": 0, "fill": "var(--ink)"},
        "bests": [
            {"at": best.daly_s, "lost": best.lost_share, "name": f"best: {style.format_seconds(best.daly_s)}"}
            for best in bests
        ],
    }


def _interval_rows(advice: IntervalAdvice) -> list[Row]:
    bests = [("this run's", advice.own)] if advice.own else []
    bests += [("assumed", one) for one in advice.assumed]
    return [
        (
            f"{whose}: {style.format_seconds(one.mtbf_s)}",
            *(one.young_s, one.daly_s),
            f"{max(1, round(one.daly_s / advice.step_s))}" if advice.step_s else None,
            one.lost_share,
        )
        for whose, one in bests
    ]
