"""Shares of time: one bar for each kind of time."""

from __future__ import annotations

from holdfast.watch.report import style
from holdfast.watch.report.style import Figure
from holdfast.watch.report.summary import RunSummary

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
        "kept": (times.kept_s, style.KEPT),
        "save()": (times.blocked_s, style.BLOCKED),
        "repeated": (times.redo_s, style.REDO),
        "down": (times.down_s, style.DOWN),
        "restoring": (times.restore_s, style.RESTORE),
    }
    values = [
        {
            "kind": kind,
            "s": took_s,
            "label": f"{style.format_seconds(took_s)}, {style.format_share(took_s / whole_s)}",
        }
        for kind, (took_s, _) in kinds.items()
    ]
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.62}},
        "encoding": {
            "fill": style.color_by("kind", {kind: look for kind, (_, look) in kinds.items()}, legend=False)
        },
    }
    # Next to the bar if there is room, otherwise on it with its own background.
    labels = {"mark": {"type": "text", "align": "left", "dx": 5}, "encoding": {"text": {"field": "label"}}}
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
            "axis": {"title": None, "labelExpr": style.SPAN_AXIS, "values": style.span_ticks(longest)},
        },
    }
    spec = {
        **style.make_chart([bars, labels], height=30 * len(values)),
        "data": {"values": values},
        "encoding": shared,
    }
    rows = [
        (one["kind"], style.format_seconds(one["s"]), style.format_share(one["s"] / whole_s))
        for one in values
    ]
    return style.make_figure("shares", "Time by kind", _TEXT, spec, ("what", "took", "share"), rows)
