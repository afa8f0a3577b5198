"""Cost of one save in a training: steps with it, compared with the steps before and after. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from intervals import interval_of

MAX_OTHERS = 0.05
"""Share of one processor that other programs may use during a comparison that counts."""
MIN_UNDISTURBED = 6
"""Comparisons without others from which on only such ones count."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cost of one save: its span, less as many steps of the spans without a save before and after it.

    Attributes:
        lost_s: wall time.
        cpu_s: processor time of the process, its children and keepers.
        wait_s: time for which optimizer steps waited.
        blocked_s: time of the call.
        num_steps: steps of the span: the save is durable before its last one.
        step_s: time of a step without a save.
        copy_s: time of one copy of the state in memory, just before.
        others: processors that other programs used meanwhile, on average.
    """

    lost_s: float
    cpu_s: float
    wait_s: float
    blocked_s: float
    num_steps: int
    step_s: float
    copy_s: float
    others: float


def undisturbed(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons during which other programs did nothing that matters."""
    return [one for one in found if one.others <= MAX_OTHERS]


def counted(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that count: the undisturbed ones, or all if these are too few."""
    quiet = undisturbed(found)
    return quiet if len(quiet) >= min(MIN_UNDISTURBED, len(found)) else list(found)


def summarize(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Return the medians of some comparisons, and estimates of what a save costs."""
    found = counted(comparisons)
    return {
        "step_s": statistics.median(one.step_s for one in found),
        "train_steps": statistics.median(one.num_steps for one in found),
        "train_blocked_s": statistics.median(one.blocked_s for one in found),
        "train_wait_s": statistics.median(one.wait_s for one in found),
        "train_copy_s": statistics.median(one.copy_s for one in found),
        "lost_s": interval_of([one.lost_s for one in found]).estimate,
        "save_cpu_s": interval_of([one.cpu_s for one in found]).estimate,
    }
