"""Watch of slow ranks: a thread of a keeper compares the own times of the ranks, and names slow ones."""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace
from typing_extensions import override

from holdfast.checkpoint.home.history import read_new_lines
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch
from holdfast.checkpoint.watch import ActionWatch, WatchedRun
from holdfast.errors import Corrupt, HoldfastError, InvalidInput
from holdfast.system.units import Duration, parse_duration
from holdfast.watch.pace.windows import (
    BEGUN,
    EVENT,
    NAME,
    OVER,
    ActivitySampler,
    PaceWindow,
    RankWindow,
    SlowPeriod,
    WindowTable,
    block_of_end,
    block_of_slow,
    decode_windows,
    encode_windows,
    find_cause,
)

FACTOR = 1.15  # own time of a slow rank, as a multiple of that of the others
_MIN_WINDOW_S = 0.2


@dataclass
class SlowRanks(ActionWatch):
    """Response to a rank that all others wait for, step after step.

    Args:
        action: "report" it once in the history and on stderr; "off" to compare no ranks.
        factor: own time of a slow rank, as a multiple of that of a usual one. Own time is what it does not
            spend waiting for other ranks.
        window: time over which own times are averaged. A rank is slow if it is in six of eight windows.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = NAME
    keeper: ClassVar[str | None] = "holdfast.watch.pace.watch:PaceKeeper"
    events: ClassVar[Mapping[str, str]] = {
        EVENT: "own times of the ranks of one host in a few windows of time; with the member `pace`",
        BEGUN: "all others wait for a rank; with the member `slow`",
        OVER: "it is as quick as the others again; seconds are those in which it was slow",
    }

    actions: ClassVar[tuple[str, ...]] = ("report", "off")
    action: str = "report"
    _: KW_ONLY
    factor: float = FACTOR
    window: Duration = "15s"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.factor, (int, float)) and 1 < self.factor < math.inf):
            raise InvalidInput(f"SlowRanks(factor=) must be a number above 1, got {self.factor!r:.100}.")
        self._window_s = parse_duration(self.window, "SlowRanks(window=)")
        if self._window_s < _MIN_WINDOW_S:
            raise InvalidInput(f"SlowRanks(window=) must be at least 0.2 s, got {self.window!r:.100}.")

    @override
    def applies(self, run: WatchedRun) -> bool:
        return super().applies(run) and run.world_size > 1

    @override
    def options(self) -> Mapping[str, Any]:
        return {"factor": self.factor, "window_s": self._window_s}

    @override
    def begin(self, run: WatchedRun) -> None:
        self._sampler = ActivitySampler(run.pulse, self._window_s)

    @override
    def step(self, step: int) -> None:
        self._sampler.start()  # not earlier: a process with threads should not fork the workers of a loader

    @override
    def end(self, timeout_s: float | None) -> None:
        self._sampler.close()


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
        cost_share = round(self._cost(slow), 4)
        found = [
            SlowPeriod(
                rank,
                hosts.get(rank, "?"),
                self.slow[rank].since_unix_s if rank in self.slow else self._began_at(rank),
                round(statistics.median(self._factors[rank][-_WINDOWS:]), 3),
                cost_share,
                round(window.step_s, 6),
                find_cause(self._windows, rank),
            )
            for rank in slow
        ]
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


_LINE_WINDOWS, _MAX_LINE_WINDOWS = 4, 40
"""Windows in one line of the history: few at first, and more in a long attempt, whose log would be long."""
_AGE_WINDOWS = 60  # windows of an attempt for each one in a line


class PaceKeeper(KeeperWatch):
    """Thread that compares the ranks of its host, for the lowest one.

    In each window of time it reads the pulses of all trainers of the host. A few windows make a line of the
    history, from which rank 0's keeper takes the ranks of other hosts.
    """

    @override
    def start(self, run: KeeperRun) -> None:
        self._run, self._config, self._trainer, self._history = run, run.config, run.trainer, run.history
        self._window_s = float(self.options["window_s"])
        self._host = socket.gethostname()
        self._ranks: dict[int, _RankReader] = {}
        self._lines: list[PaceWindow] = []  # not in the history yet
        self._num_windows = 0
        self._table = WindowTable(run.config.world_size)
        self._judge = PaceJudge(run.config.world_size, self._window_s, float(self.options["factor"]))
        self._hosts: dict[int, str] = {}
        self._read: dict[str, int] = {}  # bytes of each log that were read
        run.in_background(self._watch)

    def _watch(self) -> None:
        while is_trainer_alive(self._trainer):
            number = int(time.time() // self._window_s)
            time.sleep(max(0.0, (number + 1) * self._window_s - time.time()))
            with contextlib.suppress(HoldfastError):  # a lock file could not be read; the next window may be
                self._end_window(number)
        self._flush()

    def _end_window(self, number: int) -> None:
        """Read the pulses at the end of a window, and compare the ranks."""
        infos = self._run.ranks_here()
        if not infos:
            self._ranks.clear()
            return  # another keeper of this host compares
        ranks: dict[int, RankWindow] = {}
        steps: list[float] = []
        for rank, info in infos.items():
            reader = self._ranks.get(rank)
            if reader is None or reader.info.trainer_pid != info.trainer_pid:
                reader = self._ranks[rank] = _RankReader(info)
            found = reader.read(self._window_s)
            if found is not None:
                ranks[rank] = found[0]
                steps.append(found[1])
        if ranks:
            window = PaceWindow(number, max(steps), ranks)
            self._num_windows += 1
            self._hosts |= dict.fromkeys(ranks, self._host)
            self._table.add(window)
            self._lines.append(window)
            if len(self._lines) >= min(
                _MAX_LINE_WINDOWS, max(_LINE_WINDOWS, self._num_windows // _AGE_WINDOWS)
            ):
                self._flush()
        if self._config.rank == 0:
            if len(self._ranks) < self._config.world_size:
                self._read_others()
            for window in self._table.take():
                self._announce(self._judge.add(window, self._hosts))

    def _flush(self) -> None:
        """Write the windows since the last line into the history."""
        lines, self._lines = self._lines, []
        if lines:
            document = encode_windows(lines, host=self._host, window_s=self._window_s)
            self._history.record(EVENT, step=None, members={EVENT: document})

    def _read_others(self) -> None:
        """Read the windows of other hosts that are new in the history."""
        with contextlib.suppress(HoldfastError):  # the store failed; the next window reads again
            for line in read_new_lines(self._history.store, self._config.attempt, self._read, EVENT):
                found = decode_windows(line)
                if found is None or line.get("rank") in self._ranks:
                    continue
                host, window_s, windows = found
                for window in windows if window_s == self._window_s else ():
                    self._hosts |= dict.fromkeys(window.ranks, host)
                    self._table.add(window)

    def _announce(self, changed: Sequence[SlowPeriod]) -> None:
        """Record the periods that have begun and ended, and have the trainer print them."""
        own = self._ranks.get(self._config.rank)
        step = None if own is None or own.before is None else own.before.step
        begun = [period for period in changed if period.until_unix_s is None]
        for period in begun:
            self._history.record(BEGUN, step=step, detail=period.describe(), members=period.members())
        for period in changed:
            if period.until_unix_s is not None:
                text, seconds = block_of_end(period), period.until_unix_s - period.since_unix_s
                self._history.record(OVER, step=step, seconds=seconds, detail=text, members=period.members())
                self._run.show(text)
        if begun:
            self._run.show(block_of_slow(begun, self._config.home))


class _RankReader:
    """Reader of the pulse of one rank on this host, from window to window."""

    def __init__(self, info: KeeperInfo) -> None:
        self.info = info
        self.before: TrainerProgress | None = None
        self._queued_s = 0.0
        try:
            self._pulse: PulseReader | None = PulseReader.of_process(info.trainer_pid, info.pulse_fd)
        except (OSError, Corrupt):  # the trainer has exited
            self._pulse = None

    def read(self, window_s: float) -> tuple[RankWindow, float] | None:
        """Return the window since the last call, and the seconds of a step; None without training in it."""
        if self._pulse is None:
            return None
        now, before = self._pulse.read(), self.before
        queued_s, queued_before_s = _queued_s(self.info.trainer_pid, now.kernel_thread), self._queued_s
        self.before, self._queued_s = now, queued_s
        if before is None or not now.is_training or now.beats_here < 1:
            return None
        counts = [new - old for new, old in zip(now.words(NAME), before.words(NAME), strict=True)]
        window = RankWindow.of_samples(counts, (queued_s - queued_before_s) / window_s)
        num_steps = now.beats - before.beats
        step_s = window_s / num_steps if num_steps > 0 else max(now.durations_s, default=window_s)
        return None if window is None else (window, step_s)


def _queued_s(pid: int, thread: int) -> float:
    """Return the seconds that a thread has waited for a processor, else 0.

    Source: proc_pid_schedstat, the second number.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
