"""Time that training lost: one bar for each kind of time, and one for each interruption."""

from __future__ import annotations

from typing import Any

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.interruptions import Interruption
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary

_MAX_BARS = 40
_PARTS = {"repeated": style.REDO, "down": style.DOWN, "restoring": style.RESTORE}


def costs(summary: RunSummary) -> Figure | None:
    """Return the figure, or None without interruptions."""
    if not summary.interruptions:
        return None
    drawn = sorted(summary.interruptions, key=lambda one: one.cost_s)[-_MAX_BARS:]
    drawn.sort(key=lambda one: one.after)
    note = ""
    if len(drawn) < len(summary.interruptions):
        note = f" Of {len(summary.interruptions)} interruptions, the {_MAX_BARS} most expensive are drawn."
    rows = [_row(one) for one in summary.interruptions]
    return style.make_figure("costs", rows, note=note, chart=_chart(drawn))


def _chart(drawn: list[Interruption]) -> Spec:
    labels = {one.after: f"{one.before} to {one.after}" for one in drawn}

    def bar(one: Interruption, took_s: float, **more: Any) -> Spec:
        return {"which": labels[one.after], "s": took_s, "took": style.format_seconds(took_s), **more}

    parts = [
        bar(one, took_s, part=part, order=order)
        for one in drawn
        for order, (part, took_s) in enumerate(
            zip(_PARTS, (one.redo_s, one.down_s, one.restore_s), strict=True)
        )
    ]
    sums = [bar(one, one.cost_s) for one in drawn]
    longest = max(one.cost_s for one in drawn)
    axis = {"title": "attempts", "labelFontSize": 13, "ticks": False}
    return {
        "height": 28 * len(drawn) + 4,
        "parts": parts,
        "sums": sums,
        "row": {"field": "which", "type": "nominal", "sort": list(labels.values()), "axis": axis},
        "domain": [0, longest or 1],
        "ticks": style.span_ticks(longest),
        "fill": style.color_by("part", _PARTS),
        "stroke": style.color_by("part", {part: style.line_of(look) for part, look in _PARTS.items()}),
    }


def _row(one: Interruption) -> tuple[object, ...]:
    most, lost = one.max_steps_lost, str(one.steps_lost)
    if most != one.steps_lost:
        lost += f" to {most}" if most else " or more"
    remarks = [one.end or "", one.remark]
    if one.num_failed_starts:
        remarks.append(f"{plural(one.num_failed_starts, 'start')} in between without further events")
    steps, times = (one.last_step, one.restored_step, lost), (one.redo_s, one.down_s, one.restore_s)
    remark = "; ".join(filter(None, remarks)) or None
    which = f"{one.before} to {one.after}"
    return (one.last_seen_unix_s, which, one.kind, *steps, *times, one.cost_s, remark)


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
    bars = [
        {
            "kind": kind,
            "s": took_s,
            "label": f"{style.format_seconds(took_s)}, {style.format_share(took_s / whole_s)}",
        }
        for kind, (took_s, _) in kinds.items()
    ]
    longest = max(one["s"] for one in bars)
    chart = {
        "height": 30 * len(bars),
        "bars": bars,
        "kinds": list(kinds),
        "fill": style.color_by("kind", {kind: look for kind, (_, look) in kinds.items()}, legend=False),
        "domain": [0, longest * 1.01],
        "ticks": style.span_ticks(longest),
    }
    rows = [(kind, took_s, took_s / whole_s) for kind, (took_s, _) in kinds.items()]
    return style.make_figure("shares", rows, chart=chart)
