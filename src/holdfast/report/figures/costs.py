"""What each interruption cost: training to be done again, time down, time restoring."""

from __future__ import annotations

from holdfast.report.interruptions import Interruption
from holdfast.report.look import (
    DOWN,
    INK,
    REDO,
    RESTORE,
    SPAN_AXIS,
    Figure,
    Spec,
    chart,
    figure,
    moment,
    seconds,
    span_ticks,
    told_apart,
)
from holdfast.report.story import Story

_MAX_BARS = 40
_PARTS = {"done again": REDO, "down": DOWN, "restoring": RESTORE}
_TEXT = (
    "From the moment when training stood where it later went on from, until it went again. Done again: from "
    "that moment to the last sign of the attempt. Down: from there to the claim of the next attempt; it "
    "holds the steps that were done after the last sign, so a killed trainer's loss is exact in time and "
    "only bounded in steps. Restoring: from the claim until training went again."
)


def costs(story: Story) -> Figure | None:
    """The figure; None if nothing was interrupted."""
    if not story.interruptions:
        return None
    drawn = sorted(story.interruptions, key=lambda one: one.cost_s)[-_MAX_BARS:]
    drawn.sort(key=lambda one: one.after)
    text = _TEXT
    if len(drawn) < len(story.interruptions):
        text += f" Of {len(story.interruptions)} interruptions, the {_MAX_BARS} costliest are drawn."
    return figure(
        "costs",
        "What each interruption cost",
        text,
        chart(_layers(drawn), height=28 * len(drawn) + 4, legend_columns=3),
        (
            "last sign (UTC)",
            "attempt",
            "kind",
            "last step told",
            "went on from",
            "steps lost",
            "done again",
            "down",
            "restoring",
            "in all",
            "remark",
        ),
        [_row(one) for one in story.interruptions],
    )


def _layers(drawn: list[Interruption]) -> list[Spec]:
    labels = {one.after: f"{one.before} to {one.after}" for one in drawn}
    values = [
        {"which": labels[one.after], "part": part, "order": order, "s": took_s, "took": seconds(took_s)}
        for one in drawn
        for order, (part, took_s) in enumerate(
            (("done again", one.redo_s), ("down", one.down_s), ("restoring", one.restore_s))
        )
    ]
    sums = [{"which": labels[one.after], "s": one.cost_s, "took": seconds(one.cost_s)} for one in drawn]
    longest = max(one.cost_s for one in drawn)
    row = {
        "field": "which",
        "type": "nominal",
        "sort": list(labels.values()),
        "axis": {"title": "attempts", "labelFontSize": 13, "ticks": False},
    }
    scale = {"domain": [0, longest or 1], "range": [0, {"expr": "max(40, width - 90)"}]}
    axis = {"title": None, "labelExpr": SPAN_AXIS, "values": span_ticks(longest)}
    lines = {"done again": "var(--redo)", "down": "var(--down)", "restoring": RESTORE}
    return [
        {
            "data": {"values": values},
            "mark": {"type": "bar", "height": {"band": 0.62}, "strokeWidth": 1},
            "encoding": {
                "x": {"field": "s", "type": "quantitative", "stack": "zero", "scale": scale, "axis": axis},
                "y": row,
                "fill": told_apart("part", _PARTS),
                "stroke": told_apart("part", lines),
                "order": {"field": "order"},
                "tooltip": [{"field": "part"}, {"field": "took"}],
            },
        },
        {
            "data": {"values": sums},
            "mark": {"type": "text", "align": "left", "dx": 5, "fill": INK},
            "encoding": {"x": {"field": "s", "type": "quantitative"}, "y": row, "text": {"field": "took"}},
        },
    ]


def _row(one: Interruption) -> tuple[str | int | None, ...]:
    most = one.steps_lost_most
    lost = (
        str(one.steps_lost)
        if most == one.steps_lost
        else f"{one.steps_lost} to {most}"
        if most
        else f"{one.steps_lost} or more"
    )
    remarks = [one.end or "", one.remark]
    if one.num_dead_starts:
        remarks.append(f"{one.num_dead_starts} starts in between left no other trace")
    return (
        moment(one.last_seen_unix_s),
        f"{one.before} to {one.after}",
        one.kind,
        one.last_step,
        one.restored_step,
        lost,
        seconds(one.redo_s),
        seconds(one.down_s),
        seconds(one.restore_s),
        seconds(one.cost_s),
        "; ".join(filter(None, remarks)) or None,
    )
