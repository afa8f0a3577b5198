"""Watch of slow ranks: what is done about a rank that all others wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from typing_extensions import override

from holdfast.checkpoint.watch import ActionWatch, WatchedRun
from holdfast.errors import InvalidInput
from holdfast.system.units import Duration, parse_duration
from holdfast.watch.pace.judgement import FACTOR
from holdfast.watch.pace.sampler import NAME, ActivitySampler

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
    keeper: ClassVar[str | None] = "holdfast.watch.pace.keeper:PaceKeeper"
    events: ClassVar[Mapping[str, str]] = {
        "pace": "own times of the ranks of one host in a few windows of time; with the member `pace`",
        "slow-rank": "all others wait for a rank; with the member `slow`",
        "slow-rank-over": "it is as quick as the others again; seconds are those in which it was slow",
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
