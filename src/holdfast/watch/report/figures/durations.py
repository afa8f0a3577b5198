"""Durations of each save, and the contents of every tier over time."""

from __future__ import annotations

import math

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.saves import SaveRecord, tiers_in
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary

_COLOURS = {"memory": "var(--memory)", "local": style.ON_THE_WAY, "home": style.KEPT}
_DASHES: dict[str, list[int]] = {"memory": [2, 3], "local": [8, 4], "home": [1, 0]}


def levels(summary: RunSummary) -> Figure | None:
    """Return the figure, or None if no tier had contents."""
    if not summary.levels or summary.last_unix_s is None:
        return None
    tiers = tiers_in(summary.levels)
    drawn = summary.levels[-style.MAX_MARKS :]
    values = [
        {
            "t": style.to_ms(level.unix_s),
            "bytes": level.num_bytes,
            "tier": level.tier,
            "what": f"{plural(level.num_checkpoints, 'checkpoint')}, {style.format_size(level.num_bytes)}",
        }
        for level in drawn
    ]
    last = {level.tier: level for level in drawn}
    end = style.to_ms(summary.end_unix_s or drawn[-1].unix_s)
    values += [
        {"t": end, "bytes": level.num_bytes, "tier": tier, "what": "at the end"}
        for tier, level in last.items()
    ]
    note = ""
    if summary.home_contents is not None:
        held = summary.home_contents
        size = style.format_size(held.num_bytes) if held.num_checkpoints else "nothing"
        note = f" At present home holds {size} (checkpoints: {held.num_checkpoints})."
    looks = {tier: _COLOURS.get(tier, "var(--ink)") for tier in tiers}
    dashes = {tier: _DASHES.get(tier, [4, 2]) for tier in tiers}
    return style.make_figure(
        "levels",
        [(one.unix_s, one.tier, one.num_checkpoints, one.num_bytes) for one in summary.levels],
        note=note,
        chart={
            "levels": values,
            "time": style.time_axis("t", summary),
            "stroke": style.color_by("tier", looks),
            "dashes": style.color_by("tier", dashes),
        },
    )


_LOOKS = {
    "save() blocked the loop": (style.BLOCKED, "square"),
    "staged after": ("var(--staged)", "diamond"),
    "durable in memory after": ("var(--memory)", "triangle-down"),
    "durable in local after": (style.ON_THE_WAY, "triangle-up"),
    "durable in home after": (style.KEPT, "circle"),
}


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
    note = "" if every == 1 else f" One of every {every} saves is drawn."
    rows = [row for save in summary.saves for row in _rows(save)]
    chart = _chart(summary, values) if values else None
    return style.make_figure("durations", rows, note=note, chart=chart)


def _measures(save: SaveRecord) -> dict[str, float]:
    found = {"save() blocked the loop": save.blocked_s, "staged after": save.staged_s}
    found.update({f"durable in {copy.tier} after": copy.durable_s for copy in save.copies})
    return {what: took_s for what, took_s in found.items() if took_s is not None and what in _LOOKS}


def _chart(summary: RunSummary, values: list[Spec]) -> Spec:
    used = {one["what"] for one in values}
    looks = {what: look for what, look in _LOOKS.items() if what in used}
    shortest, longest = min(one["s"] for one in values), max(one["s"] for one in values)
    low, high = 10.0 ** math.floor(math.log10(shortest)), 10.0 ** math.ceil(math.log10(longest))
    return {
        "points": values,
        "time": style.time_axis("t", summary),
        "domain": [low, high if high > low else low * 10],
        "ticks": style.span_log_ticks(low, high),
        "fill": style.color_by("what", {what: look[0] for what, look in looks.items()}),
        "shape": style.color_by("what", {what: look[1] for what, look in looks.items()}),
    }


def _rows(save: SaveRecord) -> list[tuple[object, ...]]:
    facts = save.started_unix_s, save.attempt, save.step, save.num_bytes, save.blocked_s, save.staged_s
    if not save.copies:
        return [(*facts, None, None, None, None, save.outcome)]
    rows = []
    for copy in save.copies:
        speed = f"{style.format_size(copy.bytes_per_s)}/s" if copy.bytes_per_s else None
        written, durable = style.format_seconds(copy.write_s), style.format_seconds(copy.durable_s)
        outcome = save.outcome if copy.durable_unix_s is None else "durable"
        rows.append((*facts, copy.tier, written, speed, durable, outcome))
    return rows
