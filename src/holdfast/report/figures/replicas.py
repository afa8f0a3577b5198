"""Differences of replicas: the ranks whose copies of a tensor had other bytes, and the tensors."""

from __future__ import annotations

from holdfast.report import style
from holdfast.report.events import HistoryEvent
from holdfast.report.style import Cell, Figure
from holdfast.report.summary import RunSummary
from holdfast.units import plural

_TEXT = (
    "Several ranks hold the same tensor, and their copies had different bytes in a checkpoint. It and those "
    "after it are marked as unhealthy until the copies are equal again."
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
        ("recorded (UTC)", "attempt", "step", "difference"),
        [_row(one) for one in found.differences],
    )


def _row(one: HistoryEvent) -> tuple[Cell, ...]:
    return style.format_time(one.unix_s), one.attempt, one.step, one.detail
