"""Judgement about slow ranks from the own time of each rank, and the periods it begins and ends; pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

from msgspec import Struct
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


class SlowRank(Struct, frozen=True):
    """Rank that the others wait for."""

    rank: int
    since: int  # number of the window in which it became slow
    factor: float  # its own time, as a multiple of that of a usual rank


class PaceVerdict(Struct, frozen=True):
    """Verdict about all ranks, without slow ones if there are too few windows."""

    slow: tuple[SlowRank, ...] = ()  # the slowest first
    cost_share: float = 0.0  # of the time, which all would save if these were as quick as the slowest other


class _RankPast(Struct):
    """Recent windows of one rank, relative to a usual rank."""

    factors: list[float] = []
    since: int | None = None  # it is slow since this window

    def is_above(self, factor: float) -> bool:
        """Return True if most of the recent windows are above `factor`."""
        return sum(one >= factor for one in self.factors[-_WINDOWS:]) >= _LEAST_WINDOWS

    def has_risen(self) -> bool:
        """Return True if the rank is slow already, or most recent windows are far above those before."""
        earlier = self.factors[:-_WINDOWS]
        is_known = len(earlier) >= _LEAST_EARLIER
        return self.since is not None or (is_known and self.is_above(_RISE * statistics.median(earlier)))


class PaceJudge:
    """Judge of the ranks of one attempt. Each window of time adds the own time of each rank.

    The own time of a rank is what it does not spend waiting for others. In synchronous training all ranks
    take equally long for a step, and the slow one is the one that waits least. A usual rank is the median of
    all in the same window, so that work which differs from step to step counts for nobody. Where as many
    ranks are slow as are not, such as the stages of a pipeline, no rank is to blame for being one of them;
    then a rank is slow only if it is slower than it was.
    """

    def __init__(self, factor: float = FACTOR) -> None:
        self._factor = factor  # own time from which a rank is slow, as a multiple of that of a usual rank
        self._past: dict[int, _RankPast] = {}
        self._windows: dict[int, dict[int, float]] = {}
        """Recent windows by their number: own times as shares of the step, by rank."""

    def add(
        self, number: int, own_s: Mapping[int, float], *, world_size: int, whole_s: float | None = None
    ) -> PaceVerdict:
        """Add a window with a greater number than those before; return the verdict about the last ones.

        The own times are in seconds per step or shares of the window, and so is `whole_s`, the duration of a
        step, by default that of the slowest rank. A window without nearly all ranks is ignored.
        """
        own = {rank: time for rank, time in own_s.items() if math.isfinite(time) and time >= 0}
        if world_size < 2 or len(own) < max(2, _LEAST_PRESENT * world_size):
            return PaceVerdict()
        # The lower one: of two ranks, or of two equal halves, the quicker one is the usual one.
        usual = statistics.median_low(own.values())
        if usual <= 0:
            return PaceVerdict()
        whole = max(own.values()) if whole_s is None else whole_s
        self._windows[number] = {rank: own_time / whole for rank, own_time in own.items()}
        while len(self._windows) > _WINDOWS:
            del self._windows[min(self._windows)]
        for rank, own_time in own.items():
            past = self._past.setdefault(rank, _RankPast())
            past.factors = [*past.factors, own_time / usual][-_MAX_EARLIER:]
        if len(self._windows) < _LEAST_WINDOWS:
            return PaceVerdict()
        self._update(world_size)
        slow = [
            SlowRank(rank, past.since, round(statistics.median(past.factors[-_WINDOWS:]), 3))
            for rank, past in self._past.items()
            if past.since is not None
        ]
        cost = round(self._cost({one.rank for one in slow}), 4)
        return PaceVerdict(tuple(sorted(slow, key=lambda found: (-found.factor, found.rank))), cost)

    def _update(self, world_size: int) -> None:
        """Find the ranks that have become slow, and those that no longer are."""
        limits = {False: self._factor, True: 1 + (self._factor - 1) * _END_SHARE}  # of a rank that is slow
        above = [one for one, past in self._past.items() if past.is_above(limits[past.since is not None])]
        is_few = len(above) <= max(1, (world_size - 1) // 2)
        slow = {rank for rank in above if is_few or self._past[rank].has_risen()}
        was_slow = any(past.since is not None for past in self._past.values())
        if self._cost(slow) < LEAST_COST * (_END_SHARE if was_slow else 1.0):
            slow = set()
        for rank, past in self._past.items():
            if rank not in slow:
                past.since = None
            elif past.since is None:
                recent = past.factors[-_WINDOWS:]  # the newest is that of the newest window
                numbers = list(self._windows)[-len(recent) :]
                pairs = zip(numbers, recent, strict=True)
                past.since = next((number for number, factor in pairs if factor >= self._factor), numbers[0])

    def _cost(self, slow: set[int]) -> float:
        """Return the share of the time that all wait for the slow ranks."""
        costs: list[float] = []
        for own in self._windows.values():
            slowest = max(own.values())
            others = max((one for rank, one in own.items() if rank not in slow), default=slowest)
            costs.append(max(0.0, slowest - others))
        return statistics.median(costs)


class SlowRankAnnouncer:
    """Announcer of the slow ranks of one attempt: each period when it is certain, and at its end."""

    def __init__(self, world_size: int, factor: float) -> None:
        self._world_size = world_size
        self._judge = PaceJudge(factor)
        self._recent: deque[PaceWindow] = deque(maxlen=_WINDOWS)
        self._open: dict[int, SlowPeriod] = {}

    def add(self, window: PaceWindow, *, window_s: float, hosts: Mapping[int, str]) -> list[SlowPeriod]:
        """Add a window with all ranks, its length, and the name of the host of each rank.

        Return the periods that have begun, and those that have ended, which have an end.
        """
        shares = window.shares
        if not shares:
            return []
        self._recent.append(window)
        verdict = self._judge.add(window.number, shares, world_size=self._world_size, whole_s=1.0)
        slow, end_s = {found.rank: found for found in verdict.slow}, (window.number + 1) * window_s
        gone, new = sorted(set(self._open) - set(slow)), [rank for rank in slow if rank not in self._open]
        ended = [replace(self._open.pop(rank), until_unix_s=end_s) for rank in gone]
        for rank, found in slow.items():
            self._open[rank] = SlowPeriod(
                rank,
                hosts.get(rank, "?"),
                found.since * window_s if rank in new else self._open[rank].since_unix_s,
                found.factor,
                verdict.cost_share,
                round(window.step_s, 6),
                find_cause(tuple(self._recent), rank),
            )
        return [*(self._open[rank] for rank in new), *ended]
