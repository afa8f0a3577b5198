"""Confidence intervals of what neighbouring measurements differ by. Pure.

Source: J. L. Hodges, E. L. Lehmann, "Estimates of location based on rank tests", 1963; the interval is that
of Wilcoxon's signed ranks, from the exact distribution.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate of a difference, and the interval that contains the true one.

    Attributes:
        confidence: probability of that, at most 1: just above the wanted one, because it is exact. Below it
            for fewer than 6 pairs, whose widest interval is not wide enough.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    num_pairs: int

    def divided_by(self, unit: float) -> Interval:
        """Return the same in multiples of a positive unit."""
        return Interval(
            self.estimate / unit, self.low / unit, self.high / unit, self.confidence, self.num_pairs
        )


def interval_of(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median of all pairwise means, with its confidence interval.

    The errors of two neighbouring measurements have the same distribution, whatever it is, so that their
    differences are symmetric about the true one. Nothing else is assumed. From 12 pairs on, one measurement
    during which the machine was busy moves the interval by no more than any other large value would.

    Args:
        differences: at least one; independent of each other.
        confidence: least probability that the interval contains the true difference.
    """
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(differences, 2))
    number, actual = _num_outside(len(differences), confidence)
    return Interval(
        statistics.median(means), means[number], means[-1 - number], actual, num_pairs=len(differences)
    )


def _num_outside(count: int, confidence: float) -> tuple[int, float]:
    """Return how many pairwise means are left out at each end, and the confidence that remains."""
    ways = _ways_to_rank_sums(count)
    total = 2**count
    number, below = 0, ways[0]  # ways to a rank sum of at most `number`
    while 2 * (below + ways[number + 1]) <= math.floor((1 - confidence) * total):
        number += 1
        below += ways[number]
    return number, 1 - 2 * below / total


def _ways_to_rank_sums(count: int) -> list[int]:
    """Return for each sum the number of subsets of the ranks 1 to `count` that have it."""
    ways = [1] + [0] * (count * (count + 1) // 2)
    for rank in range(1, count + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    return ways
