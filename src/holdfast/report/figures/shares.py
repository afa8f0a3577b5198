"""Shares of time: one bar for each kind of time."""

from __future__ import annotations

from holdfast.report.style import (
    BLOCKED,
    DOWN,
    KEPT,
    REDO,
    RESTORE,
    SPAN_AXIS,
    Figure,
    color_by,
    format_seconds,
    format_share,
    make_chart,
    make_figure,
    span_ticks,
)
from holdfast.report.summary import RunSummary

_TEXT = (
    "All time from the first start to the last event, each moment counted once. Kept is training that "
    "counts, and save() the time that saving took from it. Time between the end of a run and its extension "
    "is left out."
)


def shares(summary: RunSummary) -> Figure | None:
    """Return the figure, or None if no time has passed."""
    times = summary.times
    whole_s = times.total_s - times.idle_s
    if whole_s <= 0:
        return None
    kinds = {
        "kept": (times.kept_s, KEPT),
        "save()": (times.blocked_s, BLOCKED),
        "repeated": (times.redo_s, REDO),
        "down": (times.down_s, DOWN),
        "restoring": (times.restore_s, RESTORE),
    }
    values = [
        {"kind": kind, "s": took_s, "label": f"{format_seconds(took_s)}, {format_share(took_s / whole_s)}"}
        for kind, (took_s, _) in kinds.items()
    ]
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.62}},
        "encoding": {
            "fill": color_by("kind", {kind: look for kind, (_, look) in kinds.items()}, legend=False)
        },
    }
    # Next to the bar if there is room, otherwise on it with its own background.
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
    spec = {
        **make_chart([bars, labels], height=30 * len(values)),
        "data": {"values": values},
        "encoding": shared,
    }
    rows = [(one["kind"], format_seconds(one["s"]), format_share(one["s"] / whole_s)) for one in values]
    return make_figure("shares", "Where the time went", _TEXT, spec, ("what", "took", "share"), rows)
