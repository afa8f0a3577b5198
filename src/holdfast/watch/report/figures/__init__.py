"""Figures of the page, in their order: each has an explanation and its numbers, most have a chart."""

from __future__ import annotations

import holdfast
from holdfast.checkpoint.watch import WatchFigure
from holdfast.watch.report.figures.curves import curves
from holdfast.watch.report.figures.durations import durations, intervals
from holdfast.watch.report.figures.problems import hangs, nodes, pace, problems, replicas, rollbacks
from holdfast.watch.report.figures.timeline import costs, progress, shares, timeline
from holdfast.watch.report.summary import RunSummary


def make_figures(summary: RunSummary) -> dict[str, WatchFigure]:
    """Return all figures with content, by their id: those of the run, then those of the default watches."""
    makers = (progress, shares, costs, hangs, replicas, pace, rollbacks, problems, nodes, durations)
    made = {"timeline": timeline(summary), **curves(summary)}
    made.update({make.__name__: make(summary) for make in (*makers, intervals)})
    found = {name: one for name, one in made.items() if one is not None and (one.rows or one.chart)}
    for watch in holdfast.default_watches():
        lines = [line for line in summary.lines if line["event"] in watch.events]
        if lines and (figure := watch.figure(lines)) is not None:  # a watch may be named like a figure above
            found[watch.name] = figure
    return found
