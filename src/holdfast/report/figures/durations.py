"""How long each save took: from the training loop, until staged, and until durable in each tier."""

from __future__ import annotations

import math

from holdfast.report.look import (
    BLOCKED,
    KEPT,
    ON_THE_WAY,
    SPAN_AXIS,
    Cell,
    Figure,
    Spec,
    chart,
    figure,
    moment,
    ms,
    seconds,
    size,
    span_log_ticks,
    thinned,
    time_axis,
    told_apart,
)
from holdfast.report.saves import Save
from holdfast.report.story import Story

_LOOKS = {
    "save() blocked the loop": (BLOCKED, "square"),
    "staged after": ("var(--staged)", "diamond"),
    "durable in memory after": ("var(--memory)", "triangle-down"),
    "durable in local after": (ON_THE_WAY, "triangle-up"),
    "durable in home after": (KEPT, "circle"),
}
_TEXT = (
    "Each save by itself, on a scale where equal steps are equal factors. Staged: from then on "
    "nothing that training does, and no death of it, can change or lose the save. Durable: committed in "
    "that tier, counted from the call of save()."
)


def durations(story: Story) -> Figure | None:
    """The figure; None if nothing was saved."""
    if not story.saves:
        return None
    saves, every = thinned(story.saves)
    values = [
        {"t": ms(save.began_unix_s), "s": took_s, "what": what, "step": save.step, "took": seconds(took_s)}
        for save in saves
        for what, took_s in _measures(save).items()
        if took_s > 0
    ]
    used = {one["what"] for one in values}
    looks = {what: look for what, look in _LOOKS.items() if what in used}
    text = _TEXT if every == 1 else f"{_TEXT} One of every {every} saves is drawn."
    return figure(
        "durations",
        "How long saves took",
        text,
        chart([_layer(story, values, looks)], height=260, legend_columns=1) if values else None,
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
        [row for save in story.saves for row in _rows(save)],
    )


def _measures(save: Save) -> dict[str, float]:
    found = {"save() blocked the loop": save.blocked_s, "staged after": save.staged_s}
    found.update({f"durable in {copy.tier} after": copy.durable_s for copy in save.copies})
    return {what: took_s for what, took_s in found.items() if took_s is not None and what in _LOOKS}


def _layer(story: Story, values: list[Spec], looks: dict[str, tuple[str, str]]) -> Spec:
    shortest, longest = min(one["s"] for one in values), max(one["s"] for one in values)
    low, high = 10.0 ** math.floor(math.log10(shortest)), 10.0 ** math.ceil(math.log10(longest))
    scale = {"type": "log", "domain": [low, high if high > low else low * 10]}
    axis = {"title": None, "labelExpr": SPAN_AXIS, "values": span_log_ticks(low, high)}
    return {
        "data": {"values": values},
        "mark": {"type": "point", "filled": True, "size": 55, "opacity": 0.9},
        "encoding": {
            "x": time_axis("t", story),
            "y": {"field": "s", "type": "quantitative", "scale": scale, "axis": axis},
            "fill": told_apart("what", {what: look[0] for what, look in looks.items()}),
            "shape": told_apart("what", {what: look[1] for what, look in looks.items()}),
            "tooltip": [{"field": "step"}, {"field": "what"}, {"field": "took"}],
        },
    }


def _rows(save: Save) -> list[tuple[Cell, ...]]:
    start = (
        moment(save.began_unix_s),
        save.attempt,
        save.step,
        size(save.num_bytes),
        seconds(save.blocked_s),
        seconds(save.staged_s),
    )
    if not save.copies:
        return [(*start, None, None, None, None, save.outcome)]
    return [
        (
            *start,
            copy.tier,
            seconds(copy.write_s),
            f"{size(copy.bytes_per_s)}/s" if copy.bytes_per_s else None,
            seconds(copy.durable_s),
            save.outcome if copy.durable_unix_s is None else "durable",
        )
        for copy in save.copies
    ]
