"""Durations of each save: blocking the training loop, until staged, and until durable in each tier."""

from __future__ import annotations

import math

from holdfast.watch.report import style
from holdfast.watch.report.saves import SaveRecord
from holdfast.watch.report.style import Cell, Figure, Spec
from holdfast.watch.report.summary import RunSummary

_LOOKS = {
    "save() blocked the loop": (style.BLOCKED, "square"),
    "staged after": ("var(--staged)", "diamond"),
    "durable in memory after": ("var(--memory)", "triangle-down"),
    "durable in local after": (style.ON_THE_WAY, "triangle-up"),
    "durable in home after": (style.KEPT, "circle"),
}
_TEXT = (
    "Each save, on a logarithmic scale. Staged: from then on, neither further training nor a crash of the "
    "trainer can change or lose the save. Durable: committed in that tier, measured from the call of save()."
)


def durations(summary: RunSummary) -> Figure | None:
    """Return the figure, or None without saves."""
    if not summary.saves:
        return None
    saves, every = style.thin_out(summary.saves)
    values = [
        {
            "t": style.to_ms(save.started_unix_s),
            "s": took_s,
            "what": what,
            "step": save.step,
            "took": style.format_seconds(took_s),
        }
        for save in saves
        for what, took_s in _measures(save).items()
        if took_s > 0
    ]
    used = {one["what"] for one in values}
    looks = {what: look for what, look in _LOOKS.items() if what in used}
    text = _TEXT if every == 1 else f"{_TEXT} One of every {every} saves is drawn."
    return style.make_figure(
        "durations",
        "Durations of saves",
        text,
        style.make_chart([_layer(summary, values, looks)], height=260, legend_columns=1) if values else None,
        (
            "time (UTC)",
            "attempt",
            "step",
            "size",
            "save() blocked",
            "staged",
            "tier",
            "written in",
            "speed",
            "durable",
            "outcome",
        ),
        [row for save in summary.saves for row in _rows(save)],
    )


def _measures(save: SaveRecord) -> dict[str, float]:
    found = {"save() blocked the loop": save.blocked_s, "staged after": save.staged_s}
    found.update({f"durable in {copy.tier} after": copy.durable_s for copy in save.copies})
    return {what: took_s for what, took_s in found.items() if took_s is not None and what in _LOOKS}


def _layer(summary: RunSummary, values: list[Spec], looks: dict[str, tuple[str, str]]) -> Spec:
    shortest, longest = min(one["s"] for one in values), max(one["s"] for one in values)
    low, high = 10.0 ** math.floor(math.log10(shortest)), 10.0 ** math.ceil(math.log10(longest))
    scale = {"type": "log", "domain": [low, high if high > low else low * 10]}
    axis = {"title": None, "labelExpr": style.SPAN_AXIS, "values": style.span_log_ticks(low, high)}
    return {
        "data": {"values": values},
        "mark": {"type": "point", "filled": True, "size": 55, "opacity": 0.9},
        "encoding": {
            "x": style.time_axis("t", summary),
            "y": {"field": "s", "type": "quantitative", "scale": scale, "axis": axis},
            "fill": style.color_by("what", {what: look[0] for what, look in looks.items()}),
            "shape": style.color_by("what", {what: look[1] for what, look in looks.items()}),
            "tooltip": [{"field": "step"}, {"field": "what"}, {"field": "took"}],
        },
    }


def _rows(save: SaveRecord) -> list[tuple[Cell, ...]]:
    start = (
        style.format_time(save.started_unix_s),
        save.attempt,
        save.step,
        style.format_size(save.num_bytes),
        style.format_seconds(save.blocked_s),
        style.format_seconds(save.staged_s),
    )
    if not save.copies:
        return [(*start, None, None, None, None, save.outcome)]
    return [
        (
            *start,
            copy.tier,
            style.format_seconds(copy.write_s),
            f"{style.format_size(copy.bytes_per_s)}/s" if copy.bytes_per_s else None,
            style.format_seconds(copy.durable_s),
            save.outcome if copy.durable_unix_s is None else "durable",
        )
        for copy in save.copies
    ]
