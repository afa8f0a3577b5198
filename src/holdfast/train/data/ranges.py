"""Ranges of skipped samples: merged, counted and left out; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

Ranges = tuple[tuple[int, int], ...]
"""Start and end of each range, ascending; no two overlap or touch."""


def add_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the ranges with one more, merged with those that it overlaps or touches."""
    if start >= stop:
        return ranges
    before = tuple(one for one in ranges if one[1] < start)
    after = tuple(one for one in ranges if one[0] > stop)
    touched = ranges[len(before) : len(ranges) - len(after)]
    merged = (min([start, *(one[0] for one in touched)]), max([stop, *(one[1] for one in touched)]))
    return (*before, merged, *after)


def free_ranges(ranges: Ranges, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of [start, stop) that no range covers."""
    for low, high in ranges[max(0, bisect_right(ranges, (start,)) - 1) :]:
        if low >= stop:
            break
        if low > start:
            yield start, low
        start = max(start, high)
    if start < stop:
        yield start, stop


def count_free(ranges: Ranges, start: int, stop: int) -> int:
    """Return how many numbers of [start, stop) no range covers."""
    return sum(high - low for low, high in free_ranges(ranges, start, stop))


def take_free(ranges: Ranges, start: int, stop: int, num: int) -> Ranges:
    """Return the stretches with the first `num` numbers of [start, stop) that no range covers."""
    taken: list[tuple[int, int]] = []
    for low, high in free_ranges(ranges, start, stop):
        if num == 0:
            break
        high = min(high, low + num)
        taken.append((low, high))
        num -= high - low
    return tuple(taken)


def end_of(ranges: Ranges, number: int) -> int:
    """Return the end of the range that covers a number; the number itself if none does."""
    return next((high for low, high in ranges if low <= number < high), number)
