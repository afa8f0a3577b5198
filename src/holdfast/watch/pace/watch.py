"""Watch of slow ranks: a thread of a keeper compares the own times of the ranks, and names slow ones."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from holdfast.checkpoint.home.history import read_new_lines
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch
from holdfast.checkpoint.watch import ActionWatch, WatchedRun
from holdfast.errors import Corrupt, HoldfastError, InvalidInput
from holdfast.system.units import Duration, parse_duration
from holdfast.watch.pace import windows
from holdfast.watch.pace.sampler import NAME, ActivitySampler
from holdfast.watch.pace.windows import PaceJudge, PaceWindow, RankWindow, SlowPeriod, WindowTable

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
        windows.EVENT: "own times of the ranks of one host in a few windows of time; with the member `pace`",
        windows.BEGUN: "all others wait for a rank; with the member `slow`",
        windows.OVER: "it is as quick as the others again; seconds are those in which it was slow",
    }

    actions: ClassVar[tuple[str, ...]] = ("report", "off")
    action: str = "report"
    _: KW_ONLY
    factor: float = windows.FACTOR
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
            most = max(_LINE_WINDOWS, self._num_windows // _AGE_WINDOWS)
            if len(self._lines) >= min(_MAX_LINE_WINDOWS, most):
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
            document = windows.encode_windows(lines, host=self._host, window_s=self._window_s)
            self._history.record(windows.EVENT, step=None, members={windows.EVENT: document})

    def _read_others(self) -> None:
        """Read the windows of other hosts that are new in the history."""
        with contextlib.suppress(HoldfastError):  # the store failed; the next window reads again
            attempt = self._config.attempt
            for line in read_new_lines(self._history.store, attempt, self._read, windows.EVENT):
                found = windows.decode_windows(line)
                if found is None or line.get("rank") in self._ranks:
                    continue
                host, window_s, others = found
                for window in others if window_s == self._window_s else ():
                    self._hosts |= dict.fromkeys(window.ranks, host)
                    self._table.add(window)

    def _announce(self, changed: Sequence[SlowPeriod]) -> None:
        """Record the periods that have begun and ended, and have the trainer print them."""
        own = self._ranks.get(self._config.rank)
        step = None if own is None or own.before is None else own.before.step
        begun = [period for period in changed if period.until_unix_s is None]
        for period in begun:
            self._history.record(windows.BEGUN, step=step, detail=period.describe(), members=period.members())
        for period in changed:
            if period.until_unix_s is not None:
                text, seconds = windows.block_of_end(period), period.until_unix_s - period.since_unix_s
                self._history.record(
                    windows.OVER, step=step, seconds=seconds, detail=text, members=period.members()
                )
                self._run.show(text)
        if begun:
            self._run.show(windows.block_of_slow(begun, self._config.home))


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
