"""Position in the batches of a run: layout of its epochs, batches drawn, and those of completed steps."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.system.callsite import warn
from holdfast.system.units import plural

Ranges = tuple[tuple[int, int], ...]  # start and end of each range, ascending; no two overlap or touch


def add_range(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the ranges with one more, merged with those that it overlaps or touches."""
    if start >= stop:
        return ranges
    before = tuple(one for one in ranges if one[1] < start)
    after = tuple(one for one in ranges if one[0] > stop)
    touched = ranges[len(before) : len(ranges) - len(after)]
    merged = min([start, *(low for low, _ in touched)]), max([stop, *(high for _, high in touched)])
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


def first_numbers(ranges: Ranges, num: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches with the first `num` numbers of some ranges."""
    for low, high in ranges:
        if num > 0:
            yield low, min(high, low + num)
        num -= high - low


class Cursor(Struct, frozen=True):
    """Position in the units of a run, which are numbered through all epochs."""

    epoch: int = 0
    epoch_start: int = 0  # position of the epoch's first unit
    position: int = 0


class GlobalBatch(Struct, frozen=True):
    """Units of all ranks in one optimizer step."""

    before: Cursor  # its epoch, and the position at which it was drawn
    stretches: Ranges  # of positions
    after: Cursor

    @property
    def offsets(self) -> list[int]:
        """Return the places of its units in the epoch."""
        start = self.before.epoch_start
        return [place for low, high in self.stretches for place in range(low - start, high - start)]


class EpochLayout(Struct, frozen=True):
    """Division of each epoch into batches.

    The size of a batch depends only on the number of units that are left of the epoch. So the rest of an
    epoch has the same batches after a resume.
    """

    batch_size: int  # units in a batch
    min_units: int  # the fewest units of a batch
    drop_last: bool  # drop units that do not fill a batch
    count_units: Callable[[int], int]  # returns the number of units of an epoch, which is at least one

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

    def next_batch(self, cursor: Cursor, skipped: Ranges) -> GlobalBatch | None:
        """Return the next batch of the cursor's epoch; None if none is left."""
        end = cursor.epoch_start + self.count_units(cursor.epoch)
        free = tuple(free_ranges(skipped, cursor.position, end))
        num_left = sum(high - low for low, high in free)
        size = self.next_size(num_left)
        if size == 0:
            return None
        stretches = tuple(first_numbers(free, size))
        is_last = self.next_size(num_left - size) == 0
        after = self.move(cursor, end if is_last else stretches[-1][1], skipped)
        return GlobalBatch(cursor, stretches, after)

    def batch_after(self, cursor: Cursor, skipped: Ranges) -> GlobalBatch:
        """Return the next batch, of the cursor's epoch or a later one."""
        while (batch := self.next_batch(cursor, skipped)) is None:  # less than a batch is left of the epoch
            cursor = self.next_epoch(cursor, skipped)
        return batch

    def next_epoch(self, cursor: Cursor, skipped: Ranges) -> Cursor:
        """Return the cursor of the next epoch's first unit."""
        return self.move(cursor, cursor.epoch_start + self.count_units(cursor.epoch), skipped)

    def move(self, cursor: Cursor, position: int, skipped: Ranges) -> Cursor:
        """Return the cursor at the same or a later position, or after the skipped units there."""
        position = next((high for low, high in skipped if low <= position < high), position)
        epoch, start = cursor.epoch, cursor.epoch_start
        while position >= start + (num_units := self.count_units(epoch)):
            epoch, start = epoch + 1, start + num_units
        return Cursor(epoch, start, position)


_MAX_WAITING = 10_000
"""Batches that may be drawn before their steps are complete. No loader reads so far ahead."""
_MAX_SKIPPED = 1_000  # skipped ranges of a run


class Pass:
    """One iteration over the rest of an epoch, which draws batches."""

    def __init__(self, iterator: object) -> None:
        self.iterator = weakref.ref(iterator)
        self.cursor: Cursor | None = None  # position after the newest batch; None before the first
        self.epoch = 0  # its epoch, from the first batch on
        self.is_ended = False  # it has drawn all batches
        self.num_completed = 0  # batches whose steps are complete


class BatchProgress:
    """Position of a training in its batches.

    Loaders draw batches before training uses them. The position is that of the samples which completed
    optimizer steps have used, as soon as somebody counts steps; see `complete`. Until then it is that of the
    drawn batches.
    """

    def __init__(self, layout: EpochLayout) -> None:
        self.skipped: Ranges = ()
        self.counts_steps = False
        self._layout = layout
        self._used = self._drawn = Cursor()
        self._waiting: deque[tuple[GlobalBatch, Pass]] = deque()  # drawn, and their steps not yet complete
        self._current: Pass | None = None  # the newest that has drawn; None if it may not draw any more
        self._is_set = False  # a position was loaded, and nothing was drawn or completed since
        self._has_warned = False

    @property
    def cursor(self) -> Cursor:
        """Cursor of the next unit that no completed step has used."""
        return self._used if self.counts_steps else self._drawn

    # -- drawing ---------------------------------------------------------------------------------------------
    def draw(self, drawer: Pass) -> GlobalBatch | None:
        """Return the next batch of a pass; None at the end of its epoch."""
        if drawer.cursor is None:
            start = self._start_after(self._current) if self.counts_steps else self._drawn
            self._current, self._is_set = drawer, False
            drawer.cursor = self._layout.batch_after(start, self.skipped).before
            drawer.epoch = drawer.cursor.epoch
        elif self._current is not drawer:
            raise InvalidInput(
                "Batches were requested from an iterator that is out of date: a newer one has begun, or a "
                "restore has moved the position since, so samples would be used twice. No batch was "
                "returned. Make the iterator of the data loader after the restore (within the loop over "
                "`steps`), and iterate over it once at a time."
            )
        batch = None
        if drawer.cursor.epoch == drawer.epoch:
            batch = self._layout.next_batch(drawer.cursor, self.skipped)
        if batch is None:
            drawer.is_ended = True
            if drawer.cursor.epoch == drawer.epoch:  # nothing usable is left of it
                drawer.cursor = self._layout.next_epoch(drawer.cursor, self.skipped)
            return None
        drawer.cursor = batch.after
        self._waiting.append((batch, drawer))
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
        return batch

    def finish_draw(self, batch: GlobalBatch) -> None:
        """Record that all parts of a batch were returned."""
        self._drawn = batch.after

    def _start_after(self, former: Pass | None) -> Cursor:
        """Return where the next pass begins: at the first unit that no completed step has used.

        If a loop reads the next epoch's first batch before it completes the last step, that step is waiting.
        """
        num_waiting = len(self._waiting)
        ended = former is not None and former.is_ended and former.num_completed > 0 and not self._is_set
        if ended and num_waiting == 1:
            assert former is not None
            assert former.cursor is not None
            return former.cursor
        if ended and num_waiting > 1:
            self._warn(
                f"{plural(num_waiting, 'batch')} of the epoch were read, but their steps were not completed, "
                "and are read again. The position in the data counts the optimizer steps that the "
                "Checkpointer completes: give the batches `accumulation_steps=` if a step uses several, "
                "and count each optimizer step once"
            )
        self._waiting.clear()
        return self._used

    # -- completing ------------------------------------------------------------------------------------------
    def complete(self, num_steps: int) -> None:
        """Count completed optimizer steps. From the first call on, the position is that of their samples."""
        if not self.counts_steps:
            self.counts_steps = True
            # Before the first one, only the batches of a live pass wait for their steps: loaders read ahead.
            while self._waiting and num_steps == 0 and self._waiting[0][1].iterator() is None:
                self._waiting.popleft()
            self._used = self._waiting[0][0].before if self._waiting else self._drawn
        for number in range(num_steps):
            if not self._waiting or self._waiting[0][0].after.position > self._drawn.position:
                self._warn(
                    f"{plural(num_steps - number, 'step')} were completed without a batch of the data in "
                    "the state. The position in the data counts one global batch for each optimizer step "
                    "that the Checkpointer completes: count optimizer steps, and read the data through "
                    "one loader"
                )
                return
            batch, drawer = self._waiting.popleft()
            drawer.num_completed += 1
            self._is_set = False
            self._pass_over(batch)

    def _pass_over(self, batch: GlobalBatch) -> None:
        """Move behind a used batch. Units before it that no step has used are left out for ever."""
        expected = self._layout.batch_after(self._used, self.skipped).stretches[0][0]
        first = batch.stretches[0][0]
        if first > expected:
            self._warn(
                f"samples {expected} to {first - 1} of the run were left out: an earlier position was "
                "loaded, and training continued with an iterator that was made before"
            )
            self._add_skipped(expected, first)
        if batch.after.position > self._used.position:
            self._used = batch.after

    # -- moving ----------------------------------------------------------------------------------------------
    def load(self, cursor: Cursor, skipped: Ranges) -> None:
        """Continue at a position. Iterators that have drawn earlier samples can no longer be used."""
        if self._used.position < cursor.position and self._waiting:
            self._current = None
            self._waiting.clear()
        elif not self.counts_steps:
            self._current = None
        self.skipped = skipped
        self._used = self._layout.move(cursor, cursor.position, skipped)
        if self._current is None or not self._waiting:
            self._drawn = self._used
        self._is_set = True

    def skip(self, start: int, stop: int) -> None:
        """Leave units out for ever. A position among them moves to their end."""
        if not 0 <= start < stop:
            raise InvalidInput(f"skip({start}, {stop}): a range begins at 0 or later, and ends after that.")
        self._add_skipped(start, stop)
        self._used = self._layout.move(self._used, self._used.position, self.skipped)
        self._drawn = self._layout.move(self._drawn, self._drawn.position, self.skipped)

    def _add_skipped(self, start: int, stop: int) -> None:
        skipped = add_range(self.skipped, start, stop)
        if len(skipped) > _MAX_SKIPPED:
            raise InvalidInput(
                f"Samples {start} to {stop} cannot be skipped: {_MAX_SKIPPED} ranges are skipped already. "
                "Nothing was changed. Remove what is wrong from the data."
            )
        self.skipped = skipped

    def _warn(self, text: str) -> None:
        """Warn once that the position is not exact."""
        if not self._has_warned:
            self._has_warned = True
            warn(f"The run will not resume exactly: {text}.", ResumeWarning)
