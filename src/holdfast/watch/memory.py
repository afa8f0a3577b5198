"""Watch of host memory: warns of a rank whose memory grows before the machine ends it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.keeper.lockfile import is_trainer_alive
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch
from holdfast.checkpoint.watch import ActionWatch, WatchFigure
from holdfast.errors import HoldfastError
from holdfast.system.host_memory import available_bytes, total_bytes
from holdfast.system.units import Duration, format_bytes, format_duration, parse_duration

EVENT, GROWS = "memory", "memory-grows"
_NUM_SAMPLES, _MIN_SAMPLES = 60, 15  # samples that a slope is fitted to, and the fewest
_MIN_SHARE = 0.01  # least growth over the samples, as a share of the host's memory
_LINE_EVERY, _AGE_SAMPLES = 6, 20
"""Samples for a line of the history at first, and of an attempt for each further one in a line."""
_USED = ("RssAnon:", "RssShmem:")


@dataclass
class HostMemory(ActionWatch):
    """Response to ranks whose memory on the host grows, such as by a leak.

    Args:
        action: "report" it once in the history and as a warning; "off" to watch nothing.
        within: the warning is given when the memory of the host would be full in this time.
        period: time between two looks.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = "host-memory"
    keeper: ClassVar[str | None] = "holdfast.watch.memory:MemoryKeeper"
    events: ClassVar[Mapping[str, str]] = {
        EVENT: "memory of the ranks of one host; with the member `memory`",
        GROWS: "the memory of the host will be full soon; the detail names the rank and its growth",
    }

    actions: ClassVar[tuple[str, ...]] = ("report", "off")
    action: str = "report"
    _: KW_ONLY
    within: Duration = "30m"
    period: Duration = "10s"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within_s = parse_duration(self.within, "HostMemory(within=)")
        self._period_s = parse_duration(self.period, "HostMemory(period=)")

    @override
    def options(self) -> Mapping[str, Any]:
        return {"within_s": self._within_s, "period_s": self._period_s}

    @override
    def figure(self, lines: Sequence[Mapping[str, Any]]) -> WatchFigure | None:
        points: list[dict[str, Any]] = []
        for line in (one for one in lines if one["event"] == EVENT):
            document = line.get("memory")
            used = document.get("used") if isinstance(document, dict) else None
            for rank, num_bytes in used.items() if isinstance(used, dict) else ():
                if isinstance(num_bytes, int):
                    points.append({"t": 1000 * float(line["t"]), "gb": num_bytes / 1e9, "rank": str(rank)})
        if not points:
            return None
        warnings = [line for line in lines if line["event"] == GROWS]
        rows = tuple((str(line.get("attempt")), str(line.get("detail"))) for line in warnings)
        encoding = {
            "x": {"field": "t", "type": "temporal", "axis": {"title": "time (UTC)"}},
            "y": {"field": "gb", "type": "quantitative", "axis": {"title": "memory in GB"}},
            "color": {"field": "rank", "type": "nominal", "legend": {"title": "rank"}},
        }
        chart = {"data": {"values": points}, "mark": {"type": "line"}, "encoding": encoding}
        text = (
            "Memory of each rank's process on its host: private pages and shared memory, without files that "
            f"are only mapped. Warnings of growth: {len(warnings)}."
        )
        return WatchFigure("Host memory", text, ("attempt", "growth"), rows, chart)


class MemoryGrowth(Struct, frozen=True):
    """Growth of the memory of one host, whose ranks will fill it."""

    rank: int  # rank that grows most
    bytes_per_s: float  # its growth
    left_s: float  # time until the host has none left, at the growth of all ranks


class MemorySamples:
    """Newest samples of the memory of the ranks of one host."""

    def __init__(self) -> None:
        self.newest: deque[tuple[float, Mapping[int, int]]] = deque(maxlen=_NUM_SAMPLES)
        """Time and bytes by rank of each sample. All have the same ranks."""

    def add(self, now_s: float, used: Mapping[int, int]) -> None:
        """Add a sample. A rank that is new, or gone, begins all of them anew."""
        if self.newest and used.keys() != self.newest[-1][1].keys():
            self.newest.clear()
        self.newest.append((now_s, used))

    def growth(self, available: int, total: int) -> MemoryGrowth | None:
        """Return the steady growth of this host's ranks; None without one."""
        if len(self.newest) < _MIN_SAMPLES:
            return None
        took_s = self.newest[-1][0] - self.newest[0][0]
        slopes = {rank: self._slope(rank) for rank in self.newest[-1][1]}
        growing = {
            rank: slope for rank, slope in slopes.items() if slope > 0 and slope * took_s > _MIN_SHARE * total
        }
        if not growing:
            return None
        rank = max(growing, key=growing.__getitem__)
        return MemoryGrowth(rank, growing[rank], available / sum(growing.values()))

    def _slope(self, rank: int) -> float:
        """Return the bytes per second of a rank; 0 unless each third of the samples is above the one before.

        Source: the median of the slopes between all pairs of samples (Theil, 1950), which single peaks such
            as a save or an evaluation do not change.
        """
        points = [(time_s, used[rank]) for time_s, used in self.newest]
        third = len(points) // 3
        low, middle, high = (
            statistics.median(used for _, used in part)
            for part in (points[:third], points[third:-third], points[-third:])
        )
        if not low < middle < high:
            return 0.0
        pairs = itertools.combinations(points, 2)
        return statistics.median((later[1] - point[1]) / (later[0] - point[0]) for point, later in pairs)


def read_used_bytes(pid: int) -> int:
    """Return the private and shared memory of a process, without files that are only mapped."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_USED))


class MemoryKeeper(KeeperWatch):
    """Thread that looks at the memory of all ranks of its host, for the lowest one."""

    @override
    def start(self, run: KeeperRun) -> None:
        self._run, self._samples = run, MemorySamples()
        self._num_samples = self._num_since_line = 0
        self._has_warned = False
        run.in_background(self._watch)

    def _watch(self) -> None:
        while is_trainer_alive(self._run.trainer):
            time.sleep(float(self.options["period_s"]))
            with contextlib.suppress(HoldfastError, OSError):  # a process has just exited
                self._look()

    def _look(self) -> None:
        used = {rank: read_used_bytes(info.trainer_pid) for rank, info in self._run.ranks_here().items()}
        if not used:
            return  # another keeper of this host looks
        self._samples.add(time.monotonic(), used)
        self._num_samples += 1
        self._num_since_line += 1
        available, total = available_bytes(), total_bytes()
        if self._num_since_line >= max(_LINE_EVERY, self._num_samples // _AGE_SAMPLES):
            self._num_since_line = 0
            document = {"host": socket.gethostname(), "used": used, "available": available}
            self._run.history.record(EVENT, step=None, members={"memory": document})
        growth = self._samples.growth(available, total)
        is_near = growth is not None and growth.left_s <= float(self.options["within_s"])
        if growth is not None and is_near and not self._has_warned:
            self._warn(growth, used[growth.rank], available)
        self._has_warned = is_near

    def _warn(self, growth: MemoryGrowth, used: int, available: int) -> None:
        text = (
            f"rank {growth.rank} on {socket.gethostname()} has {format_bytes(used)} of host memory and grows "
            f"by {format_bytes(round(60 * growth.bytes_per_s))} a minute; {format_bytes(available)} are left "
            f"there, enough for {format_duration(growth.left_s)}"
        )
        self._run.history.record(GROWS, step=None, detail=text)
        self._run.warn(
            f"HOST MEMORY GROWS: {text}. Then the machine ends a process. Usual causes are tensors kept in a "
            "list with their graph (record loss.item(), or record(loss=loss)), and caches of data loaders. "
            "Training continues, and is saved."
        )
