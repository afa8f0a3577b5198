"""Nodes of the run's jobs: the checks before each attempt, those that failed, and their cost."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.jobs.node_checks import CheckedNode
from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.style import Cell, Figure
from holdfast.watch.report.summary import RunSummary

_TEXT = (
    "Before each attempt of a job, its nodes are checked: disks, room for the next save, memory, copies, "
    "products, clock. The cost is the time that the job waited for the checks; of a refused node, the "
    "duration of the attempt that was not started. `holdfast describe JOB` has all results, and "
    "`holdfast nodes` the nodes that stand out."
)


def nodes(found: RunSummary) -> Figure | None:
    """Return the figure, or None without checks."""
    checks = found.node_checks
    if not checks:
        return None
    num_failed, num_refused = (
        sum(bool(one.failures) for one in checks),
        sum(one.was_refused for one in checks),
    )
    failed = f"{plural(num_failed, 'node')} failed" if num_failed else "All passed"
    refused = f", {num_refused} refused" if num_refused else ""
    return style.make_figure(
        "nodes",
        "Checks of the nodes",
        f"{failed}{refused}; the job waited {style.format_seconds(_cost_s(checks))}. {_TEXT}",
        None,
        ("checked (UTC)", "job", "its attempt", "node", "machine", "result", "cost", "failed checks"),
        [_row(one) for one in checks],
    )


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
