"""Figures of the page, in their order: each has an explanation and its numbers, most have a chart."""

from __future__ import annotations

from holdfast.watch.report.figures.costs import costs, shares
from holdfast.watch.report.figures.curves import curves
from holdfast.watch.report.figures.durations import durations, levels
from holdfast.watch.report.figures.intervals import intervals
from holdfast.watch.report.figures.nodes import nodes
from holdfast.watch.report.figures.pace import pace
from holdfast.watch.report.figures.problems import hangs, problems, replicas, rollbacks
from holdfast.watch.report.figures.timeline import progress, timeline
from holdfast.watch.report.style import Figure
from holdfast.watch.report.summary import RunSummary


def make_figures(summary: RunSummary) -> list[Figure]:
    """Return all figures with content."""
    makers = (progress, shares, costs, hangs, replicas, pace, rollbacks, problems, nodes, durations, levels)
    others = (make(summary) for make in (*makers, intervals))
    figures = (timeline(summary), *curves(summary), *others)
    return [figure for figure in figures if figure is not None]
