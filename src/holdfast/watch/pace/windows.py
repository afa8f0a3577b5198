"""Own time of the ranks in windows of time, the judgement about slow ranks, and their periods; pure."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import astuple, replace

from holdfast.errors import Corrupt, InvalidInput, printable
from holdfast.system.documents import Count, read_as, to_plain
from holdfast.system.units import format_duration
from holdfast.watch.pace.sampler import OWN, Activity

EVENT = "pace"  # kind of the event with windows of the ranks of one host
_LEAST_SAMPLES = 10  # least number of samples in a window
_LEAST_OWN = 0.3
"""Least share of a window that the slowest rank has for itself. A phase leaves too little to compare."""
_MAX_RANKS, _MAX_WINDOWS = 4096, 100
_MAX_TIME_S = 1e11
_MAX_HOST = 255
_Share = Annotated[float, Meta(ge=0, le=1)]
_Rank = Annotated[int, Meta(ge=0, lt=10**7)]


class RankWindow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank in one window, in shares of its time."""

    runs: _Share  # with a processor, or waiting for one
    loads: _Share  # in a data loader
    sleeps: _Share  # asleep in anything else of its own
    queues: _Share = 0.0  # waiting for a processor, which is a part of the others; 0 if it is not known

    @property
    def own(self) -> float:
        """Time that it did not wait for other ranks, outside phases."""
        return self.runs + self.loads + self.sleeps

    @classmethod
    def of_samples(cls, counts: Sequence[int], queues: float) -> RankWindow | None:
        """Return a window of samples by activity; None for too few of them."""
        total = sum(counts)
        if total < _LEAST_SAMPLES or min(counts) < 0:
            return None
        runs, loads, sleeps = (counts[one] / total for one in OWN)
        return cls(runs, loads, sleeps, min(1.0, max(0.0, queues)))


class PaceWindow(Struct, frozen=True):
    """Ranks in one window of time."""

    number: int  # its begin, in windows since 1970, so that hosts have the same numbers
    step_s: float  # duration of a step
    ranks: Mapping[int, RankWindow]  # by rank

    @property
    def shares(self) -> dict[int, float]:
        """Own share of each rank; empty if the ranks hardly trained."""
        shares = {rank: one.own for rank, one in self.ranks.items()}
        return shares if max(shares.values(), default=0.0) >= _LEAST_OWN else {}


class PaceReading(Struct, frozen=True):
    """Own shares of the ranks in one window of the history."""

    attempt: int  # its attempt
    unix_s: float  # begin of the window
    shares: Mapping[int, float]  # share of the window that each rank did not wait for others


class WindowTable(Struct):
    """Windows of several hosts, until each of them has the ranks of all hosts."""

    world_size: int  # number of ranks
    _windows: dict[int, PaceWindow] = {}
    _taken: int = -1

    def add(self, window: PaceWindow) -> None:
        """Add some ranks of a window."""
        if window.number <= self._taken:
            return
        found = self._windows.get(window.number)
        if found is not None:
            ranks = {**found.ranks, **window.ranks}
            window = PaceWindow(window.number, max(found.step_s, window.step_s), ranks)
        self._windows[window.number] = window
        while len(self._windows) > _MAX_WINDOWS:
            del self._windows[min(self._windows)]

    def take(self) -> list[PaceWindow]:
        """Remove and return the windows that are complete, in order, and forget those before them."""
        whole = sorted(one.number for one in self._windows.values() if len(one.ranks) >= self.world_size)
        found = [self._windows[number] for number in whole]
        if whole:
            self._taken = whole[-1]
            self._windows = {number: one for number, one in self._windows.items() if number > self._taken}
        return found


class _Document(Struct, frozen=True):
    """Windows of one host, as a member of a line of the history."""

    host: str
    window_s: Annotated[float, Meta(gt=0, le=_MAX_TIME_S)]
    numbers: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=_MAX_WINDOWS)]
    step_s: tuple[Annotated[float, Meta(ge=0, le=_MAX_TIME_S)], ...]
    ranks: Annotated[Mapping[_Rank, tuple[RankWindow | None, ...]], Meta(max_length=_MAX_RANKS)]

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.step_s) or max(self.numbers) * self.window_s > _MAX_TIME_S:
            raise InvalidInput("its windows do not fit together, or are too late")


def encode_windows(windows: Sequence[PaceWindow], *, host: str, window_s: float) -> dict[str, Any]:
    """Return windows of one host as members of a line of the history."""
    numbers, steps_s = tuple(one.number for one in windows), tuple(round(one.step_s, 6) for one in windows)
    ranks = {
        rank: tuple(_rounded(one.ranks.get(rank)) for one in windows)
        for rank in sorted({rank for one in windows for rank in one.ranks})
    }
    return to_plain(_Document(host, window_s, numbers, steps_s, ranks))


def _rounded(window: RankWindow | None) -> RankWindow | None:
    return None if window is None else RankWindow(*(round(share, 3) for share in astuple(window)))


def decode_windows(line: Mapping[str, Any]) -> tuple[str, float, list[PaceWindow]] | None:
    """Return host, length and windows of a line of the history, else None."""
    if line.get("event") != EVENT:
        return None
    try:
        found = read_as(_Document, line.get(EVENT), "the pace of a host")
    except Corrupt:
        return None
    windows: list[PaceWindow] = []
    for i, (number, step_s) in enumerate(zip(found.numbers, found.step_s, strict=True)):
        rows = ((rank, row[i]) for rank, row in found.ranks.items() if i < len(row))
        windows.append(PaceWindow(number, step_s, {rank: one for rank, one in rows if one is not None}))
    return found.host[:_MAX_HOST], found.window_s, windows


def list_paces(lines: Iterable[Mapping[str, Any]]) -> list[PaceReading]:
    """Return the own shares of all ranks in lines of a history, window by window; the oldest first."""
    found: dict[tuple[int, float], dict[int, float]] = {}
    for line in lines:
        attempt, decoded = line.get("attempt"), decode_windows(line)
        if decoded is None or type(attempt) is not int:
            continue
        _, window_s, windows = decoded
        for window in windows:
            shares = found.setdefault((attempt, window.number * window_s), {})
            shares.update({rank: round(of_rank.own, 3) for rank, of_rank in window.ranks.items()})
    ordered = sorted(found.items(), key=lambda item: item[0][1])
    return [PaceReading(attempt, begin_s, shares) for (attempt, begin_s), shares in ordered if shares]


CAUSES = {
    Activity.RUNS: "computing",
    Activity.LOADS: "its data loader",
    Activity.SLEEPS: "sleep in its own code, such as for a disk or the network",
}
"""Causes of a longer own time, as text."""
_LEAST_EXCESS = 0.01
QUEUE_CAUSE = "waiting for a processor that something else uses"


def find_cause(windows: Iterable[PaceWindow], rank: int) -> str:
    """Return the largest part of a rank's excess as text, else ""."""
    excess = {activity: _excess(windows, rank, activity.name.lower()) for activity in CAUSES}
    largest = max(excess, key=excess.__getitem__)
    if excess[largest] <= _LEAST_EXCESS:
        return ""
    queues = _excess(windows, rank, "queues")
    return QUEUE_CAUSE if largest == Activity.RUNS and 2 * queues >= excess[largest] else CAUSES[largest]


def _excess(windows: Iterable[PaceWindow], rank: int, name: str) -> float:
    """Return a rank's share of one kind beyond the mean of the others."""
    own, others = [], []
    for window in windows:
        for number, of_rank in window.ranks.items():
            (own if number == rank else others).append(getattr(of_rank, name))
    return sum(own) / len(own) - sum(others) / len(others) if own and others else 0.0


BEGUN, OVER = "slow-rank", "slow-rank-over"  # kinds of the events at the begin and end of a period


class SlowPeriod(Struct, frozen=True):
    """Period during which the other ranks waited for one."""

    rank: int  # its number
    host: str  # name of its machine
    since_unix_s: float  # begin
    factor: float  # its own time, as a multiple of that of a usual rank
    cost_share: float  # share of the training's time that all lose by it and other slow ranks together
    step_s: float  # duration of a step
    cause: str = ""  # what most of its longer time is; "" if that is not known
    until_unix_s: float | None = None  # end; None while it lasts

    @property
    def cost_s(self) -> float:
        """Cost for all, in seconds of each step."""
        return self.cost_share * self.step_s

    def members(self) -> dict[str, Any]:
        """Return the members of its line in the history."""
        return {"slow": to_plain(self)}

    def describe(self) -> str:
        """Return it as one line of text."""
        cause = f"; most of the difference is {self.cause}" if self.cause else ""
        cost = f"{self.cost_share:.0%} of their time, {format_duration(self.cost_s)} of each step"
        return printable(
            f"rank {self.rank} on {self.host} takes {self.factor:.2f} times as long as the others for its "
            f"own part of a step; all lose {cost}{cause}"
        )


def decode_period(line: Mapping[str, Any]) -> SlowPeriod | None:
    """Return the period in a line of the history, else None."""
    if line.get("event") not in (BEGUN, OVER) or not isinstance(line.get("slow"), dict):
        return None
    with contextlib.suppress(Corrupt):
        return read_as(SlowPeriod, line["slow"], "a slow rank")
    return None


def list_slow_periods(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, SlowPeriod]]:
    """Return attempt and slow period, the oldest first, of lines of a history, which are ordered by time.

    A period has no end if its attempt ended first.
    """
    found: dict[tuple[int, int, float], SlowPeriod] = {}
    for line in lines:
        attempt, period = line.get("attempt"), decode_period(line)
        if period is not None and type(attempt) is int:
            found[attempt, period.rank, period.since_unix_s] = period
    pairs = [(attempt, period) for (attempt, _, _), period in found.items()]
    return sorted(pairs, key=lambda pair: pair[1].since_unix_s)


def block_of_slow(periods: Iterable[SlowPeriod], home: str) -> str:
    """Return the block that a training prints when ranks are slow."""
    found = list(periods)
    ranks = ", ".join(f"{one.rank} ({one.host})" for one in found)
    lines = [f"SLOW RANK{'S' if len(found) > 1 else ''}: all ranks wait for rank {ranks}, step after step."]
    lines += [f"  {one.describe()}" for one in found]
    lines.append(f"  Nothing was done; training continues. The history has it too: holdfast history {home}")
    return printable("\n".join(lines))


def block_of_end(period: SlowPeriod) -> str:
    """Return the line that a training prints at the end of a period."""
    lasted_s = (period.until_unix_s or period.since_unix_s) - period.since_unix_s
    cost = format_duration(period.cost_share * lasted_s)
    return printable(
        f"rank {period.rank} ({period.host}) is as quick as the others again. It was slow for "
        f"{format_duration(lasted_s)}, which has cost all about {cost}."
    )


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
