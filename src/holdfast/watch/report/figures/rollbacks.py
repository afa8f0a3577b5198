"""Rollbacks of the run: the spikes, the steps that were lost, and the samples that are left out."""

from __future__ import annotations

from holdfast.checkpoint.format.run import Rollback
from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.style import Cell, Figure
from holdfast.watch.report.summary import RunSummary

_TEXT = (
    "The recorded loss, or the norm of gradients, was in a spike, so training went back to the newest "
    "healthy checkpoint before it. The steps from there to the end of the attempt were lost. The samples "
    "that were read in these steps are left out for ever. The cost is the time of the lost steps and of the "
    "way back."
)


def rollbacks(found: RunSummary) -> Figure | None:
    """Return the figure, or None without rollbacks."""
    if not found.rollbacks:
        return None
    lost = sum(one.last_step - one.base_step for one in found.rollbacks)
    count = f"{plural(len(found.rollbacks), 'rollback')}, which lost {plural(lost, 'step')}."
    return style.make_figure(
        "rollbacks",
        "Rollbacks",
        f"{count} {_TEXT}",
        None,
        (
            "recorded (UTC)",
            "attempt",
            "spike at step",
            "from step",
            "to step",
            "in a row",
            "cost",
            "left out",
            "reason",
        ),
        [_row(found, one) for one in found.rollbacks],
    )


def _row(found: RunSummary, one: Rollback) -> tuple[Cell, ...]:
    left_out = [f"samples {start} to {stop - 1} of {key}" for key, (start, stop) in one.skipped.items()]
    cost_s = found.cost_after(one.attempt)
    return (
        style.format_time(one.noted_unix_s),
        one.attempt,
        one.first_step,
        one.last_step,
        one.base_step,
        one.in_a_row,
        None if cost_s is None else style.format_seconds(cost_s),
        "; ".join([*left_out, *(f"{key} stayed at its position" for key in one.kept)]),
        one.reason,
    )
