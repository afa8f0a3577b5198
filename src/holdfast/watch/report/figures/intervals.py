"""Best interval between saves: the cost of saving and failing at every interval."""

from __future__ import annotations

import math

from holdfast.checkpoint.policy import BestInterval, lost_share
from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import IntervalAdvice, RunSummary

_POINTS = 80
_DASHES = ([1, 0], [8, 4], [2, 3], [8, 3, 2, 3], [14, 5])
_COLOURS = ("var(--kept)", "var(--way)", "var(--restore)", "var(--blocked)", "var(--ink)")


def intervals(summary: RunSummary) -> Figure | None:
    """Return the figure, or None if the cost of a save is unknown."""
    advice = summary.advice
    if advice.cost_s is None:
        return None
    bests = [advice.own] if advice.own else list(advice.assumed)
    return style.make_figure(
        "intervals",
        _rows(advice),
        lead=f"{_verdict(advice)}\n\n",
        chart=_chart(advice, bests) if bests else None,
    )


def _verdict(advice: IntervalAdvice) -> str:
    lower_s, upper_s = advice.mtbf_bounds_s
    own_s = ""
    if advice.interval_s:
        own_s = f"It saved every {style.format_seconds(advice.interval_s)} on average. "
    if advice.own is None:
        up = f" in {style.format_seconds(advice.up_s)} of training"
        bound = (
            f" With 95 % confidence it is more than {style.format_seconds(lower_s)}."
            if advice.up_s > 0
            else ""
        )
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


def _chart(advice: IntervalAdvice, bests: list[BestInterval]) -> Spec | None:
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
    legend = {"legend": None} if len(names) == 1 else {}
    own_s = advice.interval_s
    is_right = own_s is not None and own_s > math.sqrt(low * high)  # the label is on the side with room
    side = {"align": "right", "dx": -4} if is_right else {"align": "left", "dx": 4}
    return {
        "curves": values,
        "x_domain": [low, high],
        "x_ticks": style.span_log_ticks(low, high),
        "y_domain": [least, most],
        "y_ticks": style.log_ticks(least, most),
        "stroke": {**style.color_by("which", dict(zip(names, _COLOURS, strict=False))), **legend},
        "dashes": {**style.color_by("which", dict(zip(names, _DASHES, strict=False))), **legend},
        "own": [{"at": own_s, "name": f"actual: {style.format_seconds(own_s)}"}] if own_s else [],
        "own_label": {"type": "text", **side, "dy": 6, "y": 0, "fill": style.INK},
        "bests": [
            {"at": best.daly_s, "lost": best.lost_share, "name": f"best: {style.format_seconds(best.daly_s)}"}
            for best in bests
        ],
    }


def _rows(advice: IntervalAdvice) -> list[tuple[object, ...]]:
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
