"""Hangs of the run: the ranks that the others waited for, and their places."""

from __future__ import annotations

from holdfast.system.units import plural
from holdfast.watch.hang.incidents import HangIncident
from holdfast.watch.hang.text import describe_groups, summary
from holdfast.watch.report import style
from holdfast.watch.report.style import Cell, Figure
from holdfast.watch.report.summary import RunSummary

_TEXT = (
    "A rank made no progress for longer than the limit of its step or phase. The ranks that are named are "
    "those that the others waited for. If training made progress again, the cost is the time until then; "
    "otherwise that of the interruption, with the steps that were repeated. "
    "`holdfast stacks HOME --recorded --full` shows the stacks of the newest one."
)


def hangs(found: RunSummary) -> Figure | None:
    """Return the figure, or None without hangs."""
    if not found.hangs:
        return None
    newest = "\n\n".join(describe_groups(found.hangs[-1].groups))
    return style.make_figure(
        "hangs",
        "Hangs",
        f"{plural(len(found.hangs), 'hang')}. {_TEXT}\n\nThe newest one:\n\n{newest}",
        None,
        ("recorded (UTC)", "attempt", "after step", "ranks", "no progress for", "ended by", "cost", "place"),
        [_row(found, one) for one in found.hangs],
    )


def _row(found: RunSummary, one: HangIncident) -> tuple[Cell, ...]:
    cost_s = found.cost_after(one.attempt) if one.over_s is None else one.over_s
    return (
        style.format_time(one.unix_s),
        one.attempt,
        min(rank.step for rank in one.ranks),
        len(one.ranks),
        style.format_seconds(max(rank.stalled_s for rank in one.ranks)),
        "the end of the attempt" if one.over_s is None else "progress",
        None if cost_s is None else style.format_seconds(cost_s),
        summary(one.ranks),
    )
