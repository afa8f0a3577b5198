"""Own time of the ranks: sampled in each trainer, in windows of time, and the periods of slow ranks."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from types import CodeType, FrameType
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import astuple

from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.errors import Corrupt, InvalidInput, printable
from holdfast.system.documents import Count, read_as, to_plain
from holdfast.system.process_exit import complete_at_exit
from holdfast.system.units import format_duration
from holdfast.watch.hang.stacks import Frame, Kind, frame_kind

NAME = "slow-ranks"  # name of the watch. Its words in the pulse count the samples of each activity
_APART = (Kind.COMPILES, Kind.EVALUATES, Kind.DEBUGS)


class Activity(IntEnum):
    """Activity of a thread, as an index of the counts in its pulse."""

    RUNS = 0  # uses a processor, or waits for one
    LOADS = 1  # in a data loader
    SLEEPS = 2  # asleep in anything else of its own, such as a read from a disk
    WAITS = 3  # for other ranks
    APART = 4  # in a phase, an evaluation, a compilation or a debugger, which are not part of a step


OWN = (Activity.RUNS, Activity.LOADS, Activity.SLEEPS)  # activities that are a rank's own part of a step


def activity_of(codes: Iterable[CodeType], state: str) -> Activity:
    """Return the activity of a thread in some functions, innermost first, and its state in the kernel."""
    kinds = [_kind_of(code) for code in codes]
    if any(kind in _APART for kind in kinds):
        return Activity.APART
    if Kind.LOADS in kinds:
        return Activity.LOADS
    inner = next((kind for kind in kinds if kind is not None), None)
    if state == "S" and inner in (Kind.WAITS, Kind.SYNCS):
        return Activity.WAITS
    return Activity.SLEEPS if state in ("S", "D") else Activity.RUNS  # "D": it waits for a disk


@lru_cache(maxsize=10_000)
def _kind_of(code: CodeType) -> Kind | None:
    """Return the kind of place that a function decides."""
    return frame_kind(Frame(code.co_filename, 0, code.co_name))


SAMPLES_PER_WINDOW = 75  # samples in one window of time
_MAX_PERIOD_S = 0.2
_MAX_FRAMES = 200
_STAT_BYTES = 256


class ActivitySampler:
    """Thread that samples the thread that trains, and counts its activities in the pulse.

    A sample takes some 100 microseconds. It needs the GIL for a part of that, and disturbs no system call.
    """

    def __init__(self, pulse: Pulse, window_s: float) -> None:
        self._pulse = pulse
        self._period_s = min(_MAX_PERIOD_S, window_s / SAMPLES_PER_WINDOW)
        self._jitter = random.Random(os.getpid())  # equal pauses could follow the rhythm of the steps
        self._stat: tuple[int, int] | None = None  # thread and descriptor
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-pace", daemon=True)

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread.ident is None:
            complete_at_exit(self)
            self._thread.start()

    def end_with_interpreter(self, timeout_s: float | None = None) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    close = end_with_interpreter

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s * self._jitter.uniform(0.5, 1.5)):
                if self._pulse.is_in_loop:
                    self._pulse.words(NAME)[self._sample()] += 1
        finally:
            self._close_stat()

    def _sample(self) -> Activity:
        if self._pulse.is_in_phase:
            return Activity.APART
        state = self._state()
        frame = sys._current_frames().get(self._pulse.thread)
        return activity_of(_codes(frame), state)

    def _state(self) -> str:
        """Return the state of the thread in the kernel, such as "R"; "" if it has ended."""
        thread = self._pulse.kernel_thread
        try:
            if self._stat is None or self._stat[0] != thread:
                self._close_stat()
                path = f"/proc/self/task/{thread}/stat"
                self._stat = thread, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(self._stat[1], _STAT_BYTES, 0)
        except OSError:  # the thread has ended
            return ""
        return text.rpartition(b")")[2][1:2].decode(errors="replace")

    def _close_stat(self) -> None:
        if self._stat is not None:
            with contextlib.suppress(OSError):
                os.close(self._stat[1])
            self._stat = None


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the functions that a thread is in, innermost first."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame.f_code
        frame = frame.f_back


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
