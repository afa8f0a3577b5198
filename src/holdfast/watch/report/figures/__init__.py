"""Figures of the page, in their order: each has an explanation and its numbers, most have a chart."""

from __future__ import annotations

from collections.abc import Iterator

import holdfast
from holdfast.watch.report.figures.costs import costs, shares
from holdfast.watch.report.figures.curves import curves
from holdfast.watch.report.figures.durations import durations, levels
from holdfast.watch.report.figures.intervals import intervals
from holdfast.watch.report.figures.pace import pace
from holdfast.watch.report.figures.problems import hangs, nodes, problems, replicas, rollbacks
from holdfast.watch.report.figures.timeline import progress, timeline
from holdfast.watch.report.style import MAX_ROWS, Figure, framed
from holdfast.watch.report.summary import RunSummary


def make_figures(summary: RunSummary) -> list[Figure]:
    """Return all figures with content."""
    makers = (progress, shares, costs, hangs, replicas, pace, rollbacks, problems, nodes, durations, levels)
    others = (make(summary) for make in (*makers, intervals))
    figures = (timeline(summary), *curves(summary), *others, *_of_watches(summary))
    return [figure for figure in figures if figure is not None]


def _of_watches(summary: RunSummary) -> Iterator[Figure]:
    """Yield the figures that the default watches have of their own lines."""
    for watch in holdfast.default_watches():
        lines = summary.watch_lines.get(watch.name, ())
        found = watch.figure(lines) if lines else None
        if found is not None:
            rows = found.rows[-MAX_ROWS:]
            yield Figure(
                watch.name,
                found.title,
                found.text,
                None if found.chart is None else framed(found.chart),
                found.columns,
                rows,
                len(found.rows) - len(rows),
            )
