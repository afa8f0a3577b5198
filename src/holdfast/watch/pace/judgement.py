"""Judgement about slow ranks from the own time of each rank, and the periods it begins and ends; pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from msgspec.structs import replace

from holdfast.watch.pace.windows import PaceWindow, SlowPeriod, find_cause

FACTOR = 1.15  # own time of a slow rank, as a multiple of that of the others
_WINDOWS, _LEAST_WINDOWS = 8, 6
"""Windows that a judgement looks at, and those of them in which a slow rank must be slow."""
LEAST_COST = 0.05
"""Share of the training's time that slow ranks cost all. Ranks that cost less are not to blame."""
_END_SHARE = 0.5
"""Rest of an excess or cost at which a slow rank is no longer slow, so that a verdict does not flicker."""
_RISE = 1.5  # rise over its own earlier factor that names a rank where the work of many ranks differs
_LEAST_EARLIER, _MAX_EARLIER = 16, 240  # earlier windows that a rank is compared with
_LEAST_PRESENT = 0.9  # share of the ranks whose own times are needed


class PaceJudge:
    """Judge of the ranks of one attempt, by the own time of each rank in windows of time.

    The own time of a rank is what it does not spend waiting for others. In synchronous training all ranks
    take equally long for a step, and the slow one is the one that waits least. A usual rank is the median of
    all in the same window, so that work which differs from step to step counts for nobody. Where as many
    ranks are slow as are not, such as the stages of a pipeline, no rank is to blame for being one of them;
    then a rank is slow only if it is slower than it was.
    """

    def __init__(self, world_size: int, window_s: float, factor: float = FACTOR) -> None:
        self.slow: dict[int, SlowPeriod] = {}  # periods that last, by rank; the slowest first
        self._world_size = world_size
        self._window_s = window_s
        self._factor = factor  # own time from which a rank is slow, as a multiple of that of a usual rank
        self._factors: dict[int, list[float]] = {}  # own times by rank, as multiples of that of a usual rank
        self._windows: deque[PaceWindow] = deque(maxlen=_WINDOWS)

    def add(self, window: PaceWindow, hosts: Mapping[int, str]) -> list[SlowPeriod]:
        """Add a window with a greater number than those before, and the name of the host of each rank.

        Return the periods that have begun, and those that have ended, which have an end. A window without
        nearly all ranks is ignored, and so is one in which they hardly trained.
        """
        shares = window.shares
        if len(shares) < max(2, _LEAST_PRESENT * self._world_size):
            return []
        # The lower one: of two ranks, or of two equal halves, the quicker one is the usual one.
        usual = statistics.median_low(shares.values())
        if usual <= 0:
            return []
        self._windows.append(window)
        for rank, share in shares.items():
            self._factors[rank] = [*self._factors.get(rank, ()), share / usual][-_MAX_EARLIER:]
        if len(self._windows) < _LEAST_WINDOWS:
            return []
        slow = self._find_slow()
        found: list[SlowPeriod] = []
        costs = round(self._cost(slow), 4), round(window.step_s, 6)
        for rank in slow:
            since_unix_s = self.slow[rank].since_unix_s if rank in self.slow else self._began_at(rank)
            own = round(statistics.median(self._factors[rank][-_WINDOWS:]), 3)
            cause = find_cause(self._windows, rank)
            found.append(SlowPeriod(rank, hosts.get(rank, "?"), since_unix_s, own, *costs, cause))
        before = self.slow
        self.slow = {one.rank: one for one in sorted(found, key=lambda one: (-one.factor, one.rank))}
        end_s = (window.number + 1) * self._window_s
        ended = [replace(before[rank], until_unix_s=end_s) for rank in sorted(before.keys() - slow)]
        return [*(one for rank, one in self.slow.items() if rank not in before), *ended]

    def _find_slow(self) -> set[int]:
        """Return the ranks that have become slow, and those that still are."""
        limits = {False: self._factor, True: 1 + (self._factor - 1) * _END_SHARE}  # of a rank that is slow
        above = [one for one in self._factors if self._is_above(one, limits[one in self.slow])]
        is_few = len(above) <= max(1, (self._world_size - 1) // 2)
        slow = {rank for rank in above if is_few or rank in self.slow or self._has_risen(rank)}
        return slow if self._cost(slow) >= LEAST_COST * (_END_SHARE if self.slow else 1.0) else set()

    def _is_above(self, rank: int, factor: float) -> bool:
        """Return True if a rank is above `factor` in most of the recent windows."""
        return sum(one >= factor for one in self._factors[rank][-_WINDOWS:]) >= _LEAST_WINDOWS

    def _has_risen(self, rank: int) -> bool:
        """Return True if a rank is far above its earlier windows in most of the recent ones."""
        earlier = self._factors[rank][:-_WINDOWS]
        return len(earlier) >= _LEAST_EARLIER and self._is_above(rank, _RISE * statistics.median(earlier))

    def _began_at(self, rank: int) -> float:
        """Return the begin of a rank's first slow window among the recent ones, else of the first of all."""
        recent = self._factors[rank][-_WINDOWS:]  # the newest is that of the newest window
        numbers = [window.number for window in self._windows][-len(recent) :]
        pairs = zip(numbers, recent, strict=True)
        number = next((number for number, factor in pairs if factor >= self._factor), numbers[0])
        return number * self._window_s

    def _cost(self, slow: set[int]) -> float:
        """Return the share of the time that all wait for the slow ranks."""
        costs: list[float] = []
        for shares in (window.shares for window in self._windows):
            slowest = max(shares.values())
            others = max((one for rank, one in shares.items() if rank not in slow), default=slowest)
            costs.append(max(0.0, slowest - others))
        return statistics.median(costs)
