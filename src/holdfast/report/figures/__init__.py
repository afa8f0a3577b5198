"""Figures of the page, in their order: each has an explanation and its numbers, most have a chart."""

from __future__ import annotations

from holdfast.report.figures.costs import costs
from holdfast.report.figures.curves import curves
from holdfast.report.figures.durations import durations
from holdfast.report.figures.hangs import hangs
from holdfast.report.figures.intervals import intervals
from holdfast.report.figures.levels import levels
from holdfast.report.figures.nodes import nodes
from holdfast.report.figures.pace import pace
from holdfast.report.figures.problems import problems
from holdfast.report.figures.progress import progress
from holdfast.report.figures.replicas import replicas
from holdfast.report.figures.rollbacks import rollbacks
from holdfast.report.figures.shares import shares
from holdfast.report.figures.timeline import timeline
from holdfast.report.style import Figure
from holdfast.report.summary import RunSummary


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
