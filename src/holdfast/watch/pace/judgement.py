"""Judgement about slow ranks, from the own time of each rank; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

FACTOR = 1.15
"""Own time of a slow rank, as a multiple of that of the others."""
_WINDOWS = 8
"""Windows that a judgement looks at. A rank is slow in most of them."""
_LEAST_WINDOWS = 6
"""Windows of these in which it must be slow."""
LEAST_COST = 0.05
"""Share of the training's time that slow ranks cost all. Ranks that cost less are not to blame."""
_END_SHARE = 0.5
"""Rest of an excess or cost at which a slow rank is no longer slow, so that a verdict does not flicker."""
_UNEVEN_SHARE = 0.15
"""Share of the time that a usual rank waits, from which the work is uneven."""
_RISE = 1.5
"""Rise over its own earlier factor that names a rank where the work of many ranks differs."""
_LEAST_EARLIER = 16
"""Earlier windows that a rank is compared with."""
_MAX_EARLIER = 240
_LEAST_PRESENT = 0.9
"""Share of the ranks whose own times are needed."""


class PaceKind(str, Enum):
    """Kind of a verdict."""

    UNKNOWN = "unknown"  # too few windows
    EVEN = "even"
    SLOW_RANKS = "slow ranks"
    ALL_SLOW = "all are slow"  # all together, compared with earlier
    UNEVEN = "uneven work"  # ranks wait for each other, and no few of them are to blame


@dataclass(frozen=True, slots=True)
class SlowRank:
    """Rank that the others wait for.

    Attributes:
        rank: its number.
        since: number of the window in which it became slow, from 0.
        factor: its own time, as a multiple of that of a usual rank.
    """

    rank: int
    since: int
    factor: float


@dataclass(frozen=True, slots=True)
class PaceVerdict:
    """Verdict about all ranks.

    Attributes:
        kind: its kind.
        slow: the ranks that are slow, the slowest first.
        cost_share: share of the training's time that all would save if the slow ranks were as quick as the
            slowest of the others.
        waiting_share: share of the time that a usual rank waits for the slowest.
        rise: own time of a usual rank, as a multiple of its earlier one.
    """

    kind: PaceKind
    slow: tuple[SlowRank, ...] = ()
    cost_share: float = 0.0
    waiting_share: float = 0.0
    rise: float = 1.0


@dataclass(slots=True)
class _RankPast:
    """Recent windows of one rank, relative to a usual rank."""

    factors: list[float] = field(default_factory=list)
    since: int | None = None  # it is slow since this window

    @property
    def recent(self) -> list[float]:
        return self.factors[-_WINDOWS:]

    def is_above(self, factor: float) -> bool:
        """Return True if most of the recent windows are above `factor`."""
        return sum(one >= factor for one in self.recent) >= _LEAST_WINDOWS

    def earlier(self) -> float | None:
        """Return the usual factor of the windows before the recent ones; None for too few of them."""
        found = self.factors[:-_WINDOWS]
        return statistics.median(found) if len(found) >= _LEAST_EARLIER else None


class PaceJudge:
    """Judge of the ranks of one attempt. Each window of time adds the own time of each rank.

    The own time of a rank is what it does not spend waiting for others. In synchronous training all ranks
    take equally long for a step, and the slow one is the one that waits least. A usual rank is the median of
    all in the same window, so that work which differs from step to step counts for nobody. Where as many
    ranks are slow as are not, such as the stages of a pipeline, no rank is to blame for being one of them;
    then a rank is slow only if it is slower than it was.

    Args:
        factor: own time from which a rank is slow, as a multiple of that of a usual rank.
    """

    def __init__(self, factor: float = FACTOR) -> None:
        self._factor = factor
        self._past: dict[int, _RankPast] = {}
        self._levels: list[float] = []  # own time of a usual rank, in units of the caller
        self._windows: list[dict[int, float]] = []  # recent windows: own times as shares of the step, by rank
        self._number = 0

    def add(
        self,
        own_s: Mapping[int, float],
        *,
        world_size: int,
        whole_s: float | None = None,
        step_s: float = 1.0,
    ) -> PaceVerdict:
        """Add a window, and return the verdict about the last ones.

        Args:
            own_s: own time of each rank, in seconds per step or as a share of the window.
            world_size: number of ranks. A window without nearly all of them is ignored.
            whole_s: duration of a step in the unit of `own_s`; by default the own time of the slowest rank.
            step_s: duration of a step in seconds, if `own_s` are shares.
        """
        own = {rank: one for rank, one in own_s.items() if math.isfinite(one) and one >= 0}
        if world_size < 2 or len(own) < max(2, _LEAST_PRESENT * world_size):
            return PaceVerdict(PaceKind.UNKNOWN)
        usual = _usual(own.values())
        if usual <= 0:
            return PaceVerdict(PaceKind.UNKNOWN)
        self._number += 1
        self._levels = [*self._levels, usual * step_s][-_MAX_EARLIER:]
        whole = max(own.values()) if whole_s is None else whole_s
        self._windows = [*self._windows, {rank: one / whole for rank, one in own.items()}][-_WINDOWS:]
        for rank, one in own.items():
            past = self._past.setdefault(rank, _RankPast())
            past.factors = [*past.factors, one / usual][-_MAX_EARLIER:]
        if len(self._windows) < _LEAST_WINDOWS:
            return PaceVerdict(PaceKind.UNKNOWN)
        self._update(world_size)
        return self._verdict()

    def _update(self, world_size: int) -> None:
        """Find the ranks that have become slow, and those that no longer are."""
        above = [rank for rank in self._past if self._is_above(rank)]
        is_few = len(above) <= max(1, (world_size - 1) // 2)
        slow = {rank for rank in above if is_few or self._has_risen(self._past[rank])}
        was_slow = any(past.since is not None for past in self._past.values())
        if self._cost(slow) < LEAST_COST * (_END_SHARE if was_slow else 1.0):
            slow = set()
        for rank, past in self._past.items():
            if rank not in slow:
                past.since = None
            elif past.since is None:
                past.since = self._number - len(past.recent) + _first_above(past.recent, self._factor)

    def _cost(self, slow: set[int]) -> float:
        return statistics.median(_cost(own, slow) for own in self._windows)

    def _is_above(self, rank: int) -> bool:
        past = self._past[rank]
        excess = (self._factor - 1) * (1.0 if past.since is None else _END_SHARE)
        return past.is_above(1 + excess)

    def _has_risen(self, past: _RankPast) -> bool:
        earlier = past.earlier()
        return past.since is not None or (earlier is not None and past.is_above(_RISE * earlier))

    def _verdict(self) -> PaceVerdict:
        slow = tuple(
            SlowRank(rank, past.since, round(statistics.median(past.recent), 3))
            for rank, past in self._past.items()
            if past.since is not None
        )
        named = {one.rank for one in slow}
        waiting = statistics.median(max(own.values()) - _usual(own.values()) for own in self._windows)
        rise = self._rise()
        if slow:
            kind = PaceKind.SLOW_RANKS
        elif rise >= self._factor:
            kind = PaceKind.ALL_SLOW
        else:
            kind = PaceKind.UNEVEN if waiting >= _UNEVEN_SHARE else PaceKind.EVEN
        return PaceVerdict(
            kind,
            tuple(sorted(slow, key=lambda one: (-one.factor, one.rank))),
            round(self._cost(named), 4),
            round(waiting, 4),
            round(rise, 3),
        )

    def _rise(self) -> float:
        earlier, recent = self._levels[:-_WINDOWS], self._levels[-_WINDOWS:]
        if len(earlier) < _LEAST_EARLIER:
            return 1.0
        return statistics.median(recent) / statistics.median(earlier)


def judge(rows: Sequence[Mapping[int, float]], factor: float = FACTOR) -> list[PaceVerdict]:
    """Return the verdict after each window of a series: the own times of all ranks."""
    found = PaceJudge(factor)
    world_size = len({rank for row in rows for rank in row})
    return [found.add(row, world_size=world_size) for row in rows]


def _usual(values: Iterable[float]) -> float:
    """Return the lower median: of two ranks, or of two equal halves, the quicker one is the usual one."""
    return statistics.median_low(values)


def _cost(own: Mapping[int, float], named: set[int]) -> float:
    """Return the share of a window that all wait for the named ranks."""
    slowest = max(own.values())
    others = max((one for rank, one in own.items() if rank not in named), default=slowest)
    return max(0.0, slowest - others)


def _first_above(factors: Sequence[float], factor: float) -> int:
    return next((number for number, one in enumerate(factors) if one >= factor), 0)
