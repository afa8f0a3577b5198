"""Progress through the batches: what was drawn, and what completed steps have used."""

from __future__ import annotations

import weakref
from collections import deque

from holdfast.errors import InvalidInput, ResumeWarning
from holdfast.system.callsite import warn
from holdfast.system.units import plural
from holdfast.train.data.layout import Cursor, EpochLayout, GlobalBatch, Ranges, add_range

_MAX_WAITING = 10_000
"""Batches that may be drawn before their steps are complete. No loader reads so far ahead."""
_MAX_SKIPPED = 1_000
"""Skipped ranges of a run."""


class Pass:
    """One iteration over the rest of an epoch, which draws batches.

    Args:
        iterator: object that the caller iterates over.

    Attributes:
        iterator: weak reference to it.
        cursor: position after the newest batch; None before the first.
        epoch: its epoch.
        is_ended: it has drawn all batches.
        num_completed: batches whose steps are complete.
    """

    def __init__(self, iterator: object) -> None:
        self.iterator = weakref.ref(iterator)
        self.cursor: Cursor | None = None
        self.epoch = 0
        self.is_ended = False
        self.num_completed = 0


class BatchProgress:
    """Position of a training in its batches.

    Loaders draw batches before training uses them. The position is that of the samples which completed
    optimizer steps have used, as soon as somebody counts steps; see `complete`. Until then it is that of the
    drawn batches.

    Args:
        layout: division of epochs into batches.
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
            drawer.cursor = self._begin(drawer)
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

    def _begin(self, drawer: Pass) -> Cursor:
        """Return the cursor that a new pass begins at."""
        start = self._start_after(self._current) if self.counts_steps else self._drawn
        self._current, self._is_set = drawer, False
        while self._layout.next_batch(start, self.skipped) is None:  # less than a batch is left of the epoch
            start = self._layout.next_epoch(start, self.skipped)
        return start

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
            self._begin_counting(is_first_step=num_steps > 0)
        for number in range(num_steps):
            if not self._waiting or not self._is_drawn(self._waiting[0][0]):
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

    def _is_drawn(self, batch: GlobalBatch) -> bool:
        return batch.after.position <= self._drawn.position

    def _begin_counting(self, *, is_first_step: bool) -> None:
        """Begin to count steps.

        Before the first one, only the batches of a live pass wait for their steps: a loader may read ahead.
        """
        self.counts_steps = True
        while self._waiting and not is_first_step and self._waiting[0][1].iterator() is None:
            self._waiting.popleft()
        self._used = self._waiting[0][0].before if self._waiting else self._drawn

    def _pass_over(self, batch: GlobalBatch) -> None:
        """Move behind a used batch. Units before it that no step has used are left out for ever."""
        first, expected = batch.stretches[0][0], self._layout.first_unit(self._used, self.skipped)
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
