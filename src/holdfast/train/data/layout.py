"""Layout of epochs in global batches, from any position on; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the units of a run, which are numbered through all epochs."""

    epoch: int = 0
    epoch_start: int = 0  # position of the epoch's first unit
    position: int = 0


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Units of all ranks in one optimizer step."""

    before: Cursor  # its epoch, and the position at which it was drawn
    stretches: Ranges  # of positions
    after: Cursor

    @property
    def offsets(self) -> list[int]:
        """Return the places of its units in the epoch."""
        start = self.before.epoch_start
        return [place for low, high in self.stretches for place in range(low - start, high - start)]


@dataclass(frozen=True, slots=True)
class EpochLayout:
    """Division of each epoch into batches.

    The size of a batch depends only on the number of units that are left of the epoch. So the rest of an
    epoch has the same batches after a resume.

    Attributes:
        batch_size: units in a batch.
        min_units: the fewest units of a batch.
        drop_last: drop units that do not fill a batch.
        count_units: returns the number of units of an epoch, which is at least one.
    """

    batch_size: int
    min_units: int
    drop_last: bool
    count_units: Callable[[int], int]

    def next_size(self, num_left: int) -> int:
        """Return the size of the next batch when some units of the epoch are left; 0 if none follows."""
        if num_left == self.batch_size or num_left >= 2 * self.batch_size:
            return self.batch_size
        if self.drop_last:
            return self.batch_size if num_left > self.batch_size else 0
        if num_left > self.batch_size and num_left // 2 >= self.min_units:
            return num_left - num_left // 2
        return num_left if num_left >= self.min_units else 0

    def num_batches(self, num_units: int) -> int:
        """Return the number of batches of some units."""
        num_whole = max(0, num_units // self.batch_size - 2)
        left, number = num_units - num_whole * self.batch_size, num_whole
        while (size := self.next_size(left)) > 0:
            left, number = left - size, number + 1
        return number

    def locate(self, position: int, near: Cursor) -> Cursor:
        """Return the cursor of a position, which is not before the epoch of `near`."""
        epoch, start, num_units = near.epoch, near.epoch_start, self.count_units(near.epoch)
        while position >= start + num_units:
            epoch, start = epoch + 1, start + num_units
            num_units = self.count_units(epoch)
        return Cursor(epoch, start, position)

    def next_batch(self, cursor: Cursor, skipped: Ranges) -> GlobalBatch | None:
        """Return the next batch of the cursor's epoch; None if none is left."""
        end = cursor.epoch_start + self.count_units(cursor.epoch)
        num_left = count_free(skipped, cursor.position, end)
        size = self.next_size(num_left)
        if size == 0:
            return None
        stretches = take_free(skipped, cursor.position, end, size)
        is_last = self.next_size(num_left - size) == 0
        return GlobalBatch(
            cursor, stretches, self.move(cursor, end if is_last else stretches[-1][1], skipped)
        )

    def first_unit(self, cursor: Cursor, skipped: Ranges) -> int:
        """Return the first unit of the next batch, of this epoch or a later one."""
        while (batch := self.next_batch(cursor, skipped)) is None:
            cursor = self.next_epoch(cursor, skipped)
        return batch.stretches[0][0]

    def next_epoch(self, cursor: Cursor, skipped: Ranges) -> Cursor:
        """Return the cursor of the next epoch's first unit."""
        return self.move(cursor, cursor.epoch_start + self.count_units(cursor.epoch), skipped)

    def move(self, cursor: Cursor, position: int, skipped: Ranges) -> Cursor:
        """Return the cursor at a position, or after the skipped units there."""
        return self.locate(end_of(skipped, position), cursor)
