"""Nodes of the run's jobs: the checks before each attempt, those that failed, and their cost."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.style import Cell, Figure
from holdfast.watch.report.summary import CheckedNode, RunSummary


def nodes(found: RunSummary) -> Figure | None:
    """Return the figure, or None without checks."""
    checks = found.node_checks
    if not checks:
        return None
    num_failed = sum(bool(one.failures) for one in checks)
    num_refused = sum(one.was_refused for one in checks)
    failed = f"{plural(num_failed, 'node')} failed" if num_failed else "All passed"
    refused = f", {num_refused} refused" if num_refused else ""
    lead = f"{failed}{refused}; the job waited {style.format_seconds(_cost_s(checks))}. "
    return style.make_figure("nodes", [_row(one) for one in checks], lead=lead)


def _cost_s(checks: Iterable[CheckedNode]) -> float:
    """Return the time that all attempts waited. The nodes of an attempt are checked at the same time."""
    longest = dict[tuple[int, int], float]()
    for one in checks:
        longest[one.job, one.attempt] = max(longest.get((one.job, one.attempt), 0.0), one.cost_s)
    return sum(longest.values())


def _row(one: CheckedNode) -> tuple[Cell, ...]:
    result = "refused" if one.was_refused else "failed" if one.failures else f"{one.num_checks} passed"
    return (
        style.format_time(one.unix_s),
        one.job,
        one.attempt,
        one.node,
        one.machine,
        result,
        style.format_seconds(one.cost_s),
        one.failures or None,
    )
