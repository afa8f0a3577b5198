"""Saves of one attempt: those under way, the durable and failed ones, and the limit of failures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.run.pipeline import PendingCopy
from holdfast.checkpoint.stage import Stager
from holdfast.errors import HoldfastError, InvalidInput, SaveWarning, TornSaveWarning
from holdfast.system.callsite import warn


class Saves:
    """Saves of one attempt that any thread may begin, wait for and settle.

    Args:
        limit_s: time for which saves may fail in a row before the error is raised.
        stager: copies more at once after a torn save.
    """

    def __init__(
        self,
        limit_s: float,
        stager: Stager,
        *,
        world_size: int,
        on_durable: Callable[[Save], None],
        on_failed: Callable[[Save], None],
    ) -> None:
        self.lock = threading.RLock()  # held while outcomes are settled
        self.last: Save | None = None  # the newest save, whatever its outcome
        self.newest_durable: int | None = None
        self.stable = StableStep()
        self._limit_s, self._stager = limit_s, stager
        self._on_durable, self._on_failed = on_durable, on_failed
        self._has_others = world_size > 1
        self._last: PendingCopy | None = None
        self._pending: deque[PendingCopy] = deque()
        self._overdue = Overdue(now_s=time.monotonic())
        self._failing_since_s: float | None = None  # call of the first save that failed, of those in a row
        self._counted: set[int] = set()  # steps whose saves have failed
        self._torn_elsewhere: int | None = None  # newest step that only other ranks have torn
        self._has_warned_of_tear = False

    @property
    def pending(self) -> list[Save]:
        """The saves that are not settled yet."""
        with self.lock:
            return [one.save for one in self._pending]

    @property
    def has_pending(self) -> bool:
        """True if a save is not settled yet."""
        return bool(self._pending)

    def add(self, pending: PendingCopy) -> None:
        """Add a save that has begun."""
        with self.lock:
            self._overdue.begin(time.monotonic())
            self._pending.append(pending)
            self._last, self.last = pending, pending.save

    def has(self, step: int) -> bool:
        """Return True if the last save is of `step` and has not failed."""
        return self.last is not None and self.last.step == step and self.last.failed is None

    # -- torn saves ------------------------------------------------------------------------------------------
    @property
    def must_repeat(self) -> bool:
        """True if the last save was torn: the next step replaces it."""
        return self._last is not None and self._last.is_torn

    def note_tear(self, pending: PendingCopy | None = None) -> None:
        """Copy more at once from now on, if only another rank's save, by default the last one, was torn."""
        pending = pending or self._last
        if pending is not None and pending.save.step != self._torn_elsewhere and not pending.is_torn:
            self._torn_elsewhere = pending.save.step
            self._stager.repeats.record_torn_elsewhere()

    # -- outcomes --------------------------------------------------------------------------------------------
    def settle(self) -> list[PendingCopy]:
        """Settle the saves that have become durable; count those that have failed, and return them."""
        failed: list[PendingCopy] = []
        with self.lock:
            for pending in [one for one in self._pending if one.save.done()]:  # a queue may be long
                save = pending.save
                if not save.durable:
                    self._count_failed(save)
                    failed.append(pending)
                    continue
                self._pending.remove(pending)
                self._failing_since_s = None
                self._overdue.succeed(time.monotonic())
                self.newest_durable = save.step
                self.stable.add(save.step)
                self._on_durable(save)
        return failed

    def _count_failed(self, save: Save) -> None:
        if save.failed is not None and save.step not in self._counted:
            self._counted.add(save.step)
            self._on_failed(save)

    def surface(self) -> None:
        """Settle all saves that have ended, and warn of the failed ones.

        Raises:
            HoldfastError: they have failed for longer than the limit.
        """
        with self.lock:
            for pending in self.settle():
                if pending.save.failed is not None:
                    self._pending.remove(pending)
                    self._surface_failed(pending, pending.save.failed)

    def _surface_failed(self, pending: PendingCopy, error: HoldfastError) -> None:
        by_keeper = pending.is_torn and not pending.staging.torn  # else the stager has counted it
        self._stager.distrust_frozen(for_long=by_keeper)
        if self._has_others and isinstance(error, InvalidInput):
            self.note_tear(pending)  # also in loops that never call should_save()
        if self._failing_since_s is None:
            self._failing_since_s = pending.save.began_s
        self._overdue.fail()
        self._count_failed(pending.save)
        if time.monotonic() - self._failing_since_s > self._limit_s:
            raise error
        if not (pending.is_torn and self._has_warned_of_tear):  # later ones are in the history
            warn(str(error), TornSaveWarning if pending.is_torn else SaveWarning)
        self._has_warned_of_tear |= pending.is_torn

    def overdue(self) -> tuple[float, int] | None:
        """Return seconds and failures since the last success, if they are to be reported now."""
        since_s = self._overdue.check(time.monotonic())
        return None if since_s is None else (since_s, self._overdue.num_failed)

    def wait(self, deadline: float | None) -> None:
        """Wait until all saves are durable or have failed, at most until a deadline.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: a save is not durable at the deadline; also a TimeoutError.
        """
        for save in self.pending:
            try:
                save.wait_durable(remaining_s(deadline))
            except HoldfastError:
                if save.failed is None:
                    raise  # not yet durable, but on its way
                if save is self.last and self._drop(save):
                    raise

    def _drop(self, save: Save) -> bool:
        """Remove a save whose error is raised now and must not be raised again."""
        with self.lock:
            found = [one for one in self._pending if one.save is save]
            for pending in found:
                self._pending.remove(pending)
                self._count_failed(save)
            return bool(found)


def remaining_s(deadline: float | None) -> float | None:
    """Return the seconds left until a deadline, at least 0; None without one."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class StableStep:
    """One rank's side of finding the newest step whose files are durable on every rank.

    In each exchange a rank sends the newest step that it has. The lowest of these becomes the proposal: its
    rank has it, others may lack it because their save of it has failed. In a later exchange each rank
    sends whether it lacks the proposal. If no rank does, the step is stable. Every rank receives the same
    values, so all find the same step in the same exchange, some steps late.
    """

    def __init__(self) -> None:
        self.newest: int | None = None  # the stable step
        self.proposed: int | None = None
        self._own: set[int] = set()  # durable on this rank, no older than `newest`

    def add(self, step: int) -> None:
        """Record that this rank's files of `step` are durable."""
        self._own.add(step)

    def propose(self) -> tuple[int, bool]:
        """Return what to send: the newest step of this rank, else -1, and whether it lacks the proposal."""
        return max(self._own, default=-1), self.proposed is not None and self.proposed not in self._own

    def receive(self, answered: int | None, lowest: int, *, is_lacked: bool) -> int | None:
        """Process the outcome of an exchange; return the stable step if it is a new one.

        `answered` was the proposal then. `lowest` is of the newest steps of all ranks; -1 if a rank has none.
        """
        known = -1 if self.newest is None else self.newest
        found = None
        if answered is not None and not is_lacked and answered > known:
            found = self.newest = known = answered
            self._own = {step for step in self._own if step >= answered}
        self.proposed = lowest if lowest > known else None
        return found


_LATE_S, _LATE_INTERVALS, _MANY_FAILED = 60.0, 3, 3


class Overdue:
    """Alarm for when no save has succeeded for long.

    That is after 3 failed saves in a row, or when a save has been under way for 3 times the interval between
    saves and for a minute; and again whenever it has become twice as much.
    """

    def __init__(self, *, now_s: float) -> None:
        self.num_failed = 0
        self._succeeded_s = self._begun_s = now_s
        self._waiting_since_s: float | None = None  # the first save began that has not succeeded
        self._interval_s = 0.0
        self._factor = 1

    def begin(self, now_s: float) -> None:
        """Count a save that begins."""
        self._interval_s, self._begun_s = now_s - self._begun_s, now_s
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def fail(self) -> None:
        """Count a save that failed."""
        self.num_failed += 1

    def succeed(self, now_s: float) -> None:
        """Count a save that became durable."""
        self.num_failed, self._succeeded_s, self._waiting_since_s, self._factor = 0, now_s, None, 1

    def check(self, now_s: float) -> float | None:
        """Return the seconds since the last success, if that is to be reported now."""
        waited_s = 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s
        is_late = waited_s > self._factor * max(_LATE_S, _LATE_INTERVALS * self._interval_s)
        if not is_late and self.num_failed < _MANY_FAILED * self._factor:
            return None
        self._factor *= 2
        return now_s - self._succeeded_s
