"""Training metrics, such as the loss: one line over the steps that count, discarded ones lighter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.checkpoint.watch import WatchFigure
from holdfast.watch.report import style
from holdfast.watch.report.curves import Curve, Point
from holdfast.watch.report.style import Spec
from holdfast.watch.report.summary import RunSummary

MAX_CURVES = 8  # metrics that are drawn. `holdfast history --metrics` prints all
_MAX_LABELS = 12  # of attempts; more would overlap
_MAX_DOTS = 50  # values that are also drawn as dots
_LOG_FROM = 1000.0  # smallest ratio of values for a logarithmic axis
_COUNTS, _LOST = "counts", "discarded"


def curves(summary: RunSummary) -> dict[str, WatchFigure]:
    """Return a figure for each metric with several values, at most `MAX_CURVES`, by its id."""
    drawn = [one for one in summary.curves if one.points and not one.has_one_value]
    left_out = ", ".join(one.name for one in drawn[MAX_CURVES:])
    return {
        f"curve-{number}": _figure(one, left_out if number == MAX_CURVES else "")
        for number, one in enumerate(drawn[:MAX_CURVES], start=1)
    }


def _figure(curve: Curve, left_out: str) -> WatchFigure:
    counted, note = style.thin_out(curve.counted, "steps")
    if note and counted[-1] != curve.counted[-1]:
        counted.append(curve.counted[-1])
    num_lost = sum(map(len, curve.lost))
    if num_lost:
        note += f" Discarded values: {num_lost}."
    if left_out:
        note += f" Not drawn: {left_out}; `holdfast history --metrics` has them."
    rows = [(point.step, point.attempt, f"{point.value:.6g}") for point in curve.counted]
    return style.make_figure("curve", rows, note=note, label=curve.name, chart=_chart(curve, counted))


def _chart(curve: Curve, counted: Sequence[Point]) -> Spec:
    lost = [_mark(one, _LOST) for stretch in curve.lost for one in style.thin_out(stretch)[0]]
    firsts: dict[int, int] = {}  # step that counts of each attempt
    for point in curve.counted:
        firsts.setdefault(point.attempt, point.step)
    starts = [{"step": step, "label": str(attempt)} for attempt, step in firsts.items()]
    values = [_mark(one, _COUNTS) for one in counted]
    axis: Spec = {"scale": {"zero": False}, "axis": {"title": None}}
    finite = [one.value for one in curve.points if math.isfinite(one.value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) >= _LOG_FROM:  # over many powers of ten
        ticks = style.log_ticks(min(finite), max(finite))
        axis = {"scale": {"type": "log"}, "axis": {"title": None, "values": ticks, "format": "~g"}}
    line: Spec = {"type": "line", "strokeWidth": 1.7}
    if len(values) <= _MAX_DOTS:  # a single value has no line
        line["point"] = {"size": 20, "filled": True, "fill": "var(--kept)"}
    return {
        "y": {"field": "value", "type": "quantitative", **axis},
        "starts": starts,
        "resumed": len(starts) > 1,
        "labelled": 1 < len(starts) <= _MAX_LABELS,
        "lost": lost,  # an attempt may be discarded in several stretches, which are separate lines
        "counted": values,
        "line": line,
        "spots": [*lost, *values],  # targets for tooltips: a line has one for its first step only
    }


def _mark(point: Point, what: str) -> Spec:
    value = point.value if math.isfinite(point.value) else None  # a gap in the line
    return {"step": point.step, "value": value, "attempt": point.attempt, "what": what}
