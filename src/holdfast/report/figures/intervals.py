"""How often the run should have saved: what saving and failing cost at every interval."""

from __future__ import annotations

import math

from holdfast.report.interval import Best, lost_share
from holdfast.report.look import (
    INK,
    SPAN_AXIS,
    Cell,
    Figure,
    Spec,
    chart,
    figure,
    log_ticks,
    seconds,
    share,
    span_log_ticks,
)
from holdfast.report.story import Advice, Story

_POINTS = 80
_DASHES = ([1, 0], [8, 4], [2, 3], [8, 3, 2, 3], [14, 5])
_COLOURS = ("var(--kept)", "var(--way)", "var(--restore)", "var(--blocked)", "var(--ink)")
_HOW = (
    "A save costs what save() took from the loop; what the optimizer waited and what steps were slowed "
    "beside it is not in the history. Failures are taken to come at random, independent of each other."
)


def intervals(story: Story) -> Figure | None:
    """The figure; None if nothing is known of what a save costs."""
    advice = story.advice
    if advice.cost_s is None:
        return None
    bests = [advice.own] if advice.own else list(advice.assumed)
    layers = _layers(advice, bests) if bests else []
    return figure(
        "intervals",
        "How often it should have saved",
        f"{_verdict(advice)}\n\n{_HOW}",
        chart(layers, height=260, legend_columns=1) if layers else None,
        (
            "mean time between failures",
            "best interval (Young)",
            "best interval (Daly)",
            "in steps",
            "lost at that",
        ),
        _rows(advice),
    )


def _verdict(advice: Advice) -> str:
    least, most = advice.mtbf_bounds_s
    was = f"It saved every {seconds(advice.interval_s)} on average. " if advice.interval_s else ""
    if advice.own is None:
        up = f" in {seconds(advice.up_s)} of training"
        known = f" With 95 % certainty it is more than {seconds(least)}." if advice.up_s > 0 else ""
        return (
            f"{was}There was no failure{up}, so the mean time between failures, and with it the best "
            f"interval, cannot be known.{known} Shown is what would be best if failures came that often."
        )
    best = f"Daly's best interval is {seconds(advice.own.daly_s)}, Young's {seconds(advice.own.young_s)}"
    upper = "" if most is None else f" (with 90 % certainty between {seconds(least)} and {seconds(most)})"
    verdict = (
        f"{was}{best}, for a mean time between failures of {seconds(advice.mtbf_s)}{upper}, from "
        f"{advice.num_failures} of them in {seconds(advice.up_s)} of training."
    )
    if advice.lost_share is not None and math.isfinite(advice.lost_share):
        verdict += (
            f" Expected to be lost to saving and failing: {share(advice.lost_share)} of the training at the "
            f"interval it had, {share(advice.own.lost_share)} at the best one; restarts come on top."
        )
    if advice.durable_s is not None and advice.own.daly_s < advice.durable_s:
        verdict += (
            f" A save takes {seconds(advice.durable_s)} to be durable in the nearest tier, so less than that "
            "is no use: save as soon as the last one is durable."
        )
    return verdict


def _layers(advice: Advice, bests: list[Best]) -> list[Spec]:
    names = [f"failures every {seconds(best.mtbf_s)}" for best in bests]
    middle = [best.daly_s for best in bests] + ([advice.interval_s] if advice.interval_s else [])
    low, high = max(1e-4, min(middle) / 12), max(middle) * 12
    values: list[Spec] = []
    for name, best in zip(names, bests, strict=True):
        for i in range(_POINTS):
            at = low * (high / low) ** (i / (_POINTS - 1))
            lost = lost_share(at, advice.cost_s or 0.0, best.mtbf_s)
            if 0 < lost < 100:  # beyond that it hardly comes forward
                values.append({"at": at, "lost": lost, "which": name})
    if not values:
        return []
    x = {
        "field": "at",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {
            "title": "time between saves",
            "labelExpr": SPAN_AXIS,
            "values": span_log_ticks(low, high),
        },
    }
    least, most = min(one["lost"] for one in values) / 2.5, max(one["lost"] for one in values) * 1.2
    y = {
        "field": "lost",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [least, most], "nice": False},
        "axis": {
            "title": "lost, of the training",
            "labelExpr": "format(datum.value * 100, '.2~r') + ' %'",
            "values": log_ticks(least, most),
        },
    }
    scale = {"domain": names, "range": list(_COLOURS[: len(names)])}
    dashes = {"domain": names, "range": [list(dash) for dash in _DASHES[: len(names)]]}
    legend = {"legend": None} if len(names) == 1 else {}
    curve = {
        "data": {"values": values},
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": x,
            "y": y,
            "stroke": {"field": "which", "type": "nominal", "scale": scale, "sort": names, **legend},
            "strokeDash": {"field": "which", "type": "nominal", "scale": dashes, "sort": names, **legend},
        },
    }
    return [curve, *_marks(advice, bests, x, y)]


def _marks(advice: Advice, bests: list[Best], x: Spec, y: Spec) -> list[Spec]:
    """Where the run was, and where each curve is lowest."""
    points = [
        {"at": best.daly_s, "lost": best.lost_share, "name": f"best: {seconds(best.daly_s)}"}
        for best in bests
    ]
    place = {"x": x, "y": y}
    words = {**place, "text": {"field": "name"}}
    marks: list[tuple[Spec, Spec]] = [
        ({"type": "point", "filled": True, "fill": INK, "size": 70, "opacity": 1}, place),
        (
            {"type": "text", "dy": 16, "stroke": "var(--card)", "strokeWidth": 4},
            words,
        ),  # no curve crosses a word
        ({"type": "text", "dy": 16, "fill": INK}, words),
    ]
    was = _it_was(advice.interval_s, x) if advice.interval_s else []
    return [
        *was,
        *({"data": {"values": points}, "mark": mark, "encoding": encoding} for mark, encoding in marks),
    ]


def _it_was(interval_s: float, x: Spec) -> list[Spec]:
    """A line at the interval that the run had, and its name on the side where there is room."""
    low, high = x["scale"]["domain"]
    is_right = interval_s > math.sqrt(low * high)
    side = {"align": "right", "dx": -4} if is_right else {"align": "left", "dx": 4}
    data = {"values": [{"at": interval_s, "name": f"it was {seconds(interval_s)}"}]}
    rule = {"type": "rule", "stroke": INK, "strokeDash": [3, 3]}
    label = {"type": "text", **side, "dy": 6, "y": 0, "fill": INK}
    return [
        {"data": data, "mark": rule, "encoding": {"x": x}},
        {"data": data, "mark": label, "encoding": {"x": x, "text": {"field": "name"}}},
    ]


def _rows(advice: Advice) -> list[tuple[Cell, ...]]:
    bests = [("this run's", advice.own)] if advice.own else []
    bests += [("if it were", one) for one in advice.assumed]
    return [
        (
            f"{whose}: {seconds(one.mtbf_s)}",
            seconds(one.young_s),
            seconds(one.daly_s),
            f"{max(1, round(one.daly_s / advice.step_s))}" if advice.step_s else None,
            share(one.lost_share),
        )
        for whose, one in bests
    ]
