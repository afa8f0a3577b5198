"""The figures of the page, in their order: each a chart, what it shows in words, and its numbers."""

from __future__ import annotations

from holdfast.report.figures.costs import costs
from holdfast.report.figures.curves import curves
from holdfast.report.figures.durations import durations
from holdfast.report.figures.intervals import intervals
from holdfast.report.figures.levels import levels
from holdfast.report.figures.progress import progress
from holdfast.report.figures.shares import shares
from holdfast.report.figures.timeline import timeline
from holdfast.report.look import Figure
from holdfast.report.story import Story


def figures_of(story: Story) -> list[Figure]:
    """All figures that a story has something to tell in."""
    first, *others = (
        make(story) for make in (timeline, progress, shares, costs, durations, levels, intervals)
    )
    return [one for one in (first, *curves(story), *others) if one is not None]
