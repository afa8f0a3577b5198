"""Time limit of a step, learnt from earlier ones, and the clock against it; pure."""

from __future__ import annotations

import statistics

from msgspec import Struct

from holdfast.checkpoint.keeper.pulse import TrainerProgress

MIN_LIMIT_S = 60.0
"""Shortest limit that is learnt: a slow disk or a busy network may delay any step for so long."""
TIMES_MEDIAN = 10.0  # the limit, as a multiple of the median duration of the last steps
TIMES_LONGEST = 2.0
"""The least limit, as a multiple of the longest of the last steps: such as one with an evaluation."""
MIN_STEPS = 10  # steps after which a limit is learnt
_MAX_TICK_S = 2.0
"""Longest time that one tick counts: a suspended machine makes no progress, and does not hang."""


class HangLimits(Struct, frozen=True):
    """Limits of the times without progress, in seconds."""

    step_s: float | None = None  # of a step; None to learn it
    first_s: float = 1800.0  # of the first step of a loop, and of all until the limit is learnt
    phase_s: float = 1800.0
    """Of a phase, such as an evaluation or a restore, or ten times the longest of its name before."""


def learn_limit(durations_s: tuple[float, ...]) -> float | None:
    """Return the limit of a step in seconds; None for too few durations."""
    if len(durations_s) < MIN_STEPS:
        return None
    median_s, longest_s = statistics.median(durations_s), max(durations_s)
    return max(MIN_LIMIT_S, TIMES_MEDIAN * median_s, TIMES_LONGEST * longest_s)


class StallClock:
    """Clock of the time since a trainer has made progress.

    It adds up the ticks of its caller, so that neither a suspended machine nor a delayed caller counts.
    """

    def __init__(self, limits: HangLimits) -> None:
        self.stalled_s = 0.0  # time without progress
        self.limit_s = limits.first_s  # of what the trainer is doing
        self._limits = limits
        self._seen: tuple[int, int, int] | None = None
        self._least_limit_s = 0.0
        self._phase = ""
        self._longest_s: dict[str, float] = {}

    def tick(self, progress: TrainerProgress, passed_s: float) -> bool:
        """Add a tick. Return True if the trainer has made no progress for longer than its limit."""
        seen = progress.beats, progress.beats_here, progress.phase_count
        if seen != self._seen:
            if self._phase:
                self._longest_s[self._phase] = max(self._longest_s.get(self._phase, 0.0), self.stalled_s)
            self._seen, self._phase = seen, progress.phase
            self.stalled_s = self._least_limit_s = 0.0
        elif progress.is_training:
            self.stalled_s += min(passed_s, _MAX_TICK_S)
        self.limit_s = max(self._limit(progress), self._least_limit_s)
        return progress.is_training and self.stalled_s > self.limit_s

    def extend(self, limit_s: float | None = None) -> None:
        """Give what the trainer is doing a longer limit, by default that of a phase."""
        self._least_limit_s = self._limits.phase_s if limit_s is None else limit_s

    def _limit(self, progress: TrainerProgress) -> float:
        limits = self._limits
        if progress.phase:
            return max(limits.phase_s, TIMES_MEDIAN * self._longest_s.get(progress.phase, 0.0))
        if progress.beats_here < 1:
            return limits.first_s
        if limits.step_s is not None:
            return limits.step_s
        return learn_limit(progress.durations_s) or limits.first_s
