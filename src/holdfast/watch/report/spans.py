"""Time spans that may overlap, counted once; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Span = tuple[float, float]
"""Start and end, in seconds of one clock."""


@dataclass(slots=True)
class Spans:
    """A union of time spans, kept as disjoint stretches in order."""

    stretches: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Total length."""
        return sum(end - begin for begin, end in self.stretches)

    def add(self, begin: float, end: float) -> list[Span]:
        """Add a stretch, and return the parts of it that are new."""
        if end <= begin:
            return []
        new: list[Span] = []
        at = begin
        for left, right in self.stretches:
            if right <= at or left >= end:
                continue
            if left > at:
                new.append((at, left))
            at = max(at, right)
        if at < end:
            new.append((at, end))
        touching = [one for one in self.stretches if one[1] >= begin and one[0] <= end]
        others = [one for one in self.stretches if one not in touching]
        merged = (min([begin, *(one[0] for one in touching)]), max([end, *(one[1] for one in touching)]))
        self.stretches = sorted([*others, merged])
        return new

    def contains(self, moment: float) -> bool:
        """Return True if a moment is inside, including the ends."""
        return any(begin <= moment <= end for begin, end in self.stretches)


def seconds_of(spans: Iterable[Span]) -> float:
    """Return the length of the union of stretches."""
    found, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        found += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return found
