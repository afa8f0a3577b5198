"""Figures of the page, in their order: each has an explanation and its numbers, most have a chart."""

from __future__ import annotations

from holdfast.watch.report.figures.costs import costs
from holdfast.watch.report.figures.curves import curves
from holdfast.watch.report.figures.durations import durations
from holdfast.watch.report.figures.hangs import hangs
from holdfast.watch.report.figures.intervals import intervals
from holdfast.watch.report.figures.levels import levels
from holdfast.watch.report.figures.nodes import nodes
from holdfast.watch.report.figures.pace import pace
from holdfast.watch.report.figures.problems import problems
from holdfast.watch.report.figures.progress import progress
from holdfast.watch.report.figures.replicas import replicas
from holdfast.watch.report.figures.rollbacks import rollbacks
from holdfast.watch.report.figures.shares import shares
from holdfast.watch.report.figures.timeline import timeline
from holdfast.watch.report.style import Figure
from holdfast.watch.report.summary import RunSummary


def make_figures(summary: RunSummary) -> list[Figure]:
    """Return all figures with content."""
    first, *others = (
        make(summary)
        for make in (
            timeline,
            progress,
            shares,
            costs,
            hangs,
            replicas,
            pace,
            rollbacks,
            problems,
            nodes,
            durations,
            levels,
            intervals,
        )
    )
    return [one for one in (first, *curves(summary), *others) if one is not None]
