"""Progress over time: completed steps. A restore of an older step is a drop."""

from __future__ import annotations

from holdfast.watch.report import style
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary

_DURABLE, _LOST = "durable save", "failed save"
_TEXT = (
    "Completed steps, from saves and restores. Each line is an attempt. Where a line starts lower than the "
    "previous one ended, the steps between were repeated. A line ends at the last event, not at the last "
    "step: steps of a killed trainer after its last save are not recorded."
)


def progress(summary: RunSummary) -> Figure | None:
    """Return the figure, or None without training."""
    attempts = [attempt for attempt in summary.attempts if attempt.has_trained]
    if not attempts:
        return None
    saves, _ = style.thin_out(summary.saves)
    line: list[Spec] = []
    for attempt in attempts:
        own = [(save.started_unix_s, save.step) for save in saves if save.attempt == attempt.number]
        ends = [
            (attempt.training_unix_s, attempt.restored_step or 0),
            (attempt.last_seen_unix_s, attempt.last_step),
        ]
        line += [
            {"t": style.to_ms(t), "step": step, "attempt": attempt.number}
            for t, step in sorted([*own, *ends])
        ]
    points = [
        {
            "t": style.to_ms(save.started_unix_s),
            "step": save.step,
            "what": _DURABLE if save.durable else _LOST,
            "detail": f"step {save.step}, attempt {save.attempt}: {save.outcome}",
        }
        for save in saves
    ]
    return style.make_figure(
        "progress",
        "Progress of training",
        _TEXT,
        style.make_chart(_layers(summary, line, points), height=240, legend_columns=1),
        (
            "attempt",
            "started (UTC)",
            "ranks",
            "from step",
            "restoring took",
            "last event (UTC)",
            "last step recorded",
        ),
        [
            (
                attempt.number,
                style.format_time(attempt.started_unix_s),
                attempt.num_ranks,
                attempt.restored_step,
                style.format_seconds(attempt.restore_s) if attempt.restored_step is not None else None,
                style.format_time(attempt.last_seen_unix_s),
                attempt.last_step,
            )
            for attempt in summary.attempts
        ],
    )


def _layers(summary: RunSummary, line: list[Spec], points: list[Spec]) -> list[Spec]:
    known = {_DURABLE: (style.KEPT, "circle"), _LOST: (style.BAD, "cross")}
    looks = {what: look for what, look in known.items() if any(one["what"] == what for one in points)}
    x, y = style.time_axis("t", summary), {"field": "step", "type": "quantitative", "axis": {"title": "step"}}
    return [
        {
            "data": {"values": line},
            "mark": {"type": "line", "stroke": style.INK, "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "detail": {"field": "attempt"}},
        },
        {
            "data": {"values": points},
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "fill": style.color_by("what", {what: look[0] for what, look in looks.items()}),
                "shape": style.color_by("what", {what: look[1] for what, look in looks.items()}),
                "tooltip": [{"field": "detail", "title": "save"}],
            },
        },
    ]
