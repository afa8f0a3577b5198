"""How far training was at each moment: every restore to an older step is a fall."""

from __future__ import annotations

from holdfast.report.look import (
    BAD,
    INK,
    KEPT,
    Figure,
    Spec,
    chart,
    figure,
    moment,
    ms,
    seconds,
    thinned,
    time_axis,
    told_apart,
)
from holdfast.report.story import Story

_DURABLE, _LOST = "save that became durable", "save that did not"
_TEXT = (
    "Steps completed, as far as saves and restores tell. A line is an attempt; where the next line begins "
    "lower than the last one ended, the steps between were done again. A line ends at the last sign, not at "
    "the last step: what a killed trainer did after its last save left no trace."
)


def progress(story: Story) -> Figure | None:
    """The figure; None if nothing was trained."""
    lives = [life for life in story.lives if life.has_trained]
    if not lives:
        return None
    saves, _ = thinned(story.saves)
    line: list[Spec] = []
    for life in lives:
        own = [(save.began_unix_s, save.step) for save in saves if save.attempt == life.number]
        ends = [(life.going_unix_s, life.restored_step or 0), (life.last_seen_unix_s, life.last_step)]
        line += [{"t": ms(t), "step": step, "attempt": life.number} for t, step in sorted([*own, *ends])]
    points = [
        {
            "t": ms(save.began_unix_s),
            "step": save.step,
            "what": _DURABLE if save.durable else _LOST,
            "detail": f"step {save.step}, attempt {save.attempt}: {save.outcome}",
        }
        for save in saves
    ]
    return figure(
        "progress",
        "How far training was",
        _TEXT,
        chart(_layers(story, line, points), height=240, legend_columns=1),
        (
            "attempt",
            "started (UTC)",
            "ranks",
            "from step",
            "restoring took",
            "last sign (UTC)",
            "last step told",
        ),
        [
            (
                life.number,
                moment(life.began_unix_s),
                life.num_ranks,
                life.restored_step,
                seconds(life.restore_s) if life.restored_step is not None else None,
                moment(life.last_seen_unix_s),
                life.last_step,
            )
            for life in story.lives
        ],
    )


def _layers(story: Story, line: list[Spec], points: list[Spec]) -> list[Spec]:
    known = {_DURABLE: (KEPT, "circle"), _LOST: (BAD, "cross")}
    looks = {what: look for what, look in known.items() if any(one["what"] == what for one in points)}
    x, y = time_axis("t", story), {"field": "step", "type": "quantitative", "axis": {"title": "step"}}
    return [
        {
            "data": {"values": line},
            "mark": {"type": "line", "stroke": INK, "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "detail": {"field": "attempt"}},
        },
        {
            "data": {"values": points},
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "fill": told_apart("what", {what: look[0] for what, look in looks.items()}),
                "shape": told_apart("what", {what: look[1] for what, look in looks.items()}),
                "tooltip": [{"field": "detail", "title": "save"}],
            },
        },
    ]
