"""Differences of replicas: the ranks whose copies of a tensor had other bytes, and the tensors."""

from __future__ import annotations

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.events import HistoryEvent
from holdfast.watch.report.figures.problems import good_steps_around
from holdfast.watch.report.style import Cell, Figure
from holdfast.watch.report.summary import RunSummary

_TEXT = (
    "Several ranks hold the same tensor, and their copies had different bytes in a checkpoint. It and those "
    "after it are marked as unhealthy until the copies are equal again. The cost is the training since the "
    "last healthy checkpoint of the attempt, which is in doubt. Each save compares a share of the tensors, "
    "so copies may have differed some saves before."
)


def replicas(found: RunSummary) -> Figure | None:
    """Return the figure, or None without differences."""
    if not found.differences:
        return None
    return style.make_figure(
        "replicas",
        "Differing copies",
        f"{plural(len(found.differences), 'difference')}. {_TEXT}",
        None,
        ("recorded (UTC)", "attempt", "step", "cost", "difference"),
        [_row(found, one) for one in found.differences],
    )


def _row(found: RunSummary, one: HistoryEvent) -> tuple[Cell, ...]:
    cost = None
    if one.step is not None:
        before, _ = good_steps_around(found, one.attempt, one.step, one.step)
        cost = f"{plural(one.step - before, 'step')} in doubt"
    return style.format_time(one.unix_s), one.attempt, one.step, cost, one.detail
