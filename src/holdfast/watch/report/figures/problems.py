"""Problems of the run: failed saves, sick states and spikes, with their costs."""

from __future__ import annotations

from itertools import groupby

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.events import HistoryEvent
from holdfast.watch.report.style import Cell, Figure
from holdfast.watch.report.summary import RunSummary

_TEXT = (
    "Saves that failed, were skipped or dropped, or that training was paused for, checkpoints of states that "
    "are not healthy, spikes of recorded metrics, and failed copies and deletions; equal ones in a row are "
    "one line. The cost is the steps between the checkpoints before and after: a kill in between would "
    "have lost up to so many."
)
_SAVE_KINDS = ("failed", "dropped", "skipped", "fenced", "unhealthy")
"""Kinds of events after which a step has no checkpoint that is whole and healthy."""


def problems(found: RunSummary) -> Figure | None:
    """Return the figure, or None without problems."""
    if not found.problems:
        return None
    rows = [
        _row(found, list(some))
        for _, some in groupby(found.problems, lambda one: (one.attempt, one.kind, one.rank))
    ]
    return style.make_figure(
        "problems",
        "Problems",
        f"{plural(len(found.problems), 'problem')}. {_TEXT}",
        None,
        (
            "first (UTC)",
            "last",
            "attempt",
            "rank",
            "what",
            "times",
            "first step",
            "last step",
            "cost",
            "detail",
        ),
        rows,
    )


def _row(found: RunSummary, some: list[HistoryEvent]) -> tuple[Cell, ...]:
    first, last = some[0], some[-1]
    return (
        style.format_time(first.unix_s),
        style.format_time(last.unix_s),
        first.attempt,
        first.rank,
        first.kind,
        len(some),
        first.step,
        last.step,
        _cost(found, first, last) if first.kind in _SAVE_KINDS else None,
        last.detail,
    )


def _cost(found: RunSummary, first: HistoryEvent, last: HistoryEvent) -> str | None:
    """Return the steps between the good checkpoints around some events, as the largest possible loss."""
    if first.step is None or last.step is None:
        return None
    before, after = good_steps_around(found, first.attempt, first.step, last.step)
    if after is None:
        return f"all steps after {before}"
    return f"{plural(after - before, 'step')} at risk"


def good_steps_around(found: RunSummary, attempt: int, first: int, last: int) -> tuple[int, int | None]:
    """Return the steps of the good checkpoints before and after some steps.

    Returns:
        Before it has one, the step that the attempt began at. None if there is none after.
    """
    sick = {one.step for one in found.unhealthy if one.attempt == attempt}
    good = [
        one.step for one in found.saves if one.attempt == attempt and one.durable and one.step not in sick
    ]
    began = next((one.restored_step or 0 for one in found.attempts if one.number == attempt), 0)
    before = max((step for step in good if step < first), default=began)
    return before, min((step for step in good if step > last), default=None)
