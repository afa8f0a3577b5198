"""Costs of each interruption: repeated training, time down, time restoring."""

from __future__ import annotations

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.interruptions import Interruption
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary

_MAX_BARS = 40
_PARTS = {"repeated": style.REDO, "down": style.DOWN, "restoring": style.RESTORE}
_TEXT = (
    "The cost lasts from the moment when training first reached the step that it later resumed from, until "
    "it trained again. Repeated: from that moment to the last event of the attempt. Down: from there to the "
    "claim of the next attempt, including steps after the last event. So a killed trainer's loss is exact in "
    "time, and bounded in steps. Restoring: from the claim until training resumed."
)


def costs(summary: RunSummary) -> Figure | None:
    """Return the figure, or None without interruptions."""
    if not summary.interruptions:
        return None
    drawn = sorted(summary.interruptions, key=lambda one: one.cost_s)[-_MAX_BARS:]
    drawn.sort(key=lambda one: one.after)
    text = _TEXT
    if len(drawn) < len(summary.interruptions):
        text += f" Of {len(summary.interruptions)} interruptions, the {_MAX_BARS} most expensive are drawn."
    return style.make_figure(
        "costs",
        "Cost of each interruption",
        text,
        style.make_chart(_layers(drawn), height=28 * len(drawn) + 4, legend_columns=3),
        (
            "last event (UTC)",
            "attempt",
            "kind",
            "last step recorded",
            "resumed from",
            "steps lost",
            "repeated",
            "down",
            "restoring",
            "total",
            "remark",
        ),
        [_row(one) for one in summary.interruptions],
    )


def _layers(drawn: list[Interruption]) -> list[Spec]:
    labels = {one.after: f"{one.before} to {one.after}" for one in drawn}
    values = [
        {
            "which": labels[one.after],
            "part": part,
            "order": order,
            "s": took_s,
            "took": style.format_seconds(took_s),
        }
        for one in drawn
        for order, (part, took_s) in enumerate(
            (("repeated", one.redo_s), ("down", one.down_s), ("restoring", one.restore_s))
        )
    ]
    sums = [
        {"which": labels[one.after], "s": one.cost_s, "took": style.format_seconds(one.cost_s)}
        for one in drawn
    ]
    longest = max(one.cost_s for one in drawn)
    row = {
        "field": "which",
        "type": "nominal",
        "sort": list(labels.values()),
        "axis": {"title": "attempts", "labelFontSize": 13, "ticks": False},
    }
    scale = {"domain": [0, longest or 1], "range": [0, {"expr": "max(40, width - 90)"}]}
    axis = {"title": None, "labelExpr": style.SPAN_AXIS, "values": style.span_ticks(longest)}
    lines = {"repeated": "var(--redo)", "down": "var(--down)", "restoring": style.RESTORE}
    return [
        {
            "data": {"values": values},
            "mark": {"type": "bar", "height": {"band": 0.62}, "strokeWidth": 1},
            "encoding": {
                "x": {"field": "s", "type": "quantitative", "stack": "zero", "scale": scale, "axis": axis},
                "y": row,
                "fill": style.color_by("part", _PARTS),
                "stroke": style.color_by("part", lines),
                "order": {"field": "order"},
                "tooltip": [{"field": "part"}, {"field": "took"}],
            },
        },
        {
            "data": {"values": sums},
            "mark": {"type": "text", "align": "left", "dx": 5, "fill": style.INK},
            "encoding": {"x": {"field": "s", "type": "quantitative"}, "y": row, "text": {"field": "took"}},
        },
    ]


def _row(one: Interruption) -> tuple[str | int | None, ...]:
    most = one.max_steps_lost
    lost = (
        str(one.steps_lost)
        if most == one.steps_lost
        else f"{one.steps_lost} to {most}"
        if most
        else f"{one.steps_lost} or more"
    )
    remarks = [one.end or "", one.remark]
    if one.num_failed_starts:
        remarks.append(f"{plural(one.num_failed_starts, 'start')} in between without further events")
    return (
        style.format_time(one.last_seen_unix_s),
        f"{one.before} to {one.after}",
        one.kind,
        one.last_step,
        one.restored_step,
        lost,
        style.format_seconds(one.redo_s),
        style.format_seconds(one.down_s),
        style.format_seconds(one.restore_s),
        style.format_seconds(one.cost_s),
        "; ".join(filter(None, remarks)) or None,
    )
