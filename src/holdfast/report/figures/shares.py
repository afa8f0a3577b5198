"""Where the time went: one bar for each kind of time, with its share of all of it."""

from __future__ import annotations

from holdfast.report.look import (
    BLOCKED,
    DOWN,
    KEPT,
    REDO,
    RESTORE,
    SPAN_AXIS,
    Figure,
    chart,
    figure,
    seconds,
    share,
    span_ticks,
    told_apart,
)
from holdfast.report.story import Story

_TEXT = (
    "All time from the first start to the last sign of life, each moment counted once: kept is training "
    "whose result stands, and save() is what saving took in that. Time between a run's end and its being "
    "made longer is left out."
)


def shares(story: Story) -> Figure | None:
    """The figure; None if no time has passed."""
    times = story.times
    whole_s = times.total_s - times.idle_s
    if whole_s <= 0:
        return None
    kinds = {
        "kept": (times.kept_s, KEPT),
        "save()": (times.blocked_s, BLOCKED),
        "done again": (times.redo_s, REDO),
        "down": (times.down_s, DOWN),
        "restoring": (times.restore_s, RESTORE),
    }
    values = [
        {"kind": kind, "s": took_s, "label": f"{seconds(took_s)}, {share(took_s / whole_s)}"}
        for kind, (took_s, _) in kinds.items()
    ]
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.62}},
        "encoding": {
            "fill": told_apart("kind", {kind: look for kind, (_, look) in kinds.items()}, legend=False)
        },
    }
    # Beside the bar where there is room, else on it, on a ground of its own that keeps it readable.
    labels = {
        "mark": {"type": "text", "align": "left", "dx": 5},
        "encoding": {"text": {"field": "label"}},
    }
    longest = max(one["s"] for one in values)
    shared = {
        "y": {
            "field": "kind",
            "type": "nominal",
            "sort": list(kinds),
            "axis": {
                "title": None,
                "labelFontSize": 13,
                "ticks": False,
                "labelColor": "var(--ink)",
                "labelLimit": 150,
            },
        },
        "x": {
            "field": "s",
            "type": "quantitative",
            "scale": {"domain": [0, longest * 1.01], "range": [0, {"expr": "max(40, width - 150)"}]},
            "axis": {"title": None, "labelExpr": SPAN_AXIS, "values": span_ticks(longest)},
        },
    }
    spec = {**chart([bars, labels], height=30 * len(values)), "data": {"values": values}, "encoding": shared}
    rows = [(one["kind"], seconds(one["s"]), share(one["s"] / whole_s)) for one in values]
    return figure("shares", "Where the time went", _TEXT, spec, ("what", "took", "share"), rows)
