"""Judges what was measured: does compiling pay, and is a difference more than noise; pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from holdfast.train.tuning.facts import Race, Step

LEAST_GAIN = 0.03
"""No smaller difference counts: steps of one and the same program differ by 3 to 4 %."""
_REUSED = 0.1  # no compiler saves nine tenths of a step's memory: such a difference is the allocator's


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one way to compile pays."""

    variant: str
    speed_up: float
    """Eager time of a step divided by its compiled time."""
    noise: float
    """Differences up to this share mean nothing."""
    warm_up_s: float
    break_even_steps: int | None
    """Steps after which the warm-up is earned back; None for never."""
    memory_ratio: float | None
    """Peak of a compiled step divided by that of an eager one, both without what was in use before it."""
    failure: str = ""

    @property
    def pays(self) -> bool:
        """True if it is quicker by more than the noise."""
        return not self.failure and self.speed_up > 1 + self.noise

    @property
    def is_idle(self) -> bool:
        """True if what was compiled had to be waited for, and no step is quicker for it."""
        return not self.failure and self.speed_up < 1 + LEAST_GAIN and self.warm_up_s > 0

    @property
    def costs(self) -> bool:
        """True if it is slower by more than the noise."""
        return not self.failure and self.speed_up < 1 - self.noise


def judge(race: Race) -> Verdict:
    """The verdict on a race."""
    if race.failure or len(race.eager_s) < 2 or len(race.compiled_s) < 2:
        why = race.failure or "too few steps that compiled nothing any more"
        return Verdict(race.variant, 0.0, 0.0, race.warm_up_s, None, None, why)
    eager, compiled = statistics.median(race.eager_s), statistics.median(race.compiled_s)
    noise = max(LEAST_GAIN, 2 * math.hypot(_error(race.eager_s), _error(race.compiled_s)))
    speed_up = eager / compiled
    saved_s = race.step_s * (1 - 1 / speed_up)
    even = math.ceil(race.warm_up_s / saved_s) if speed_up > 1 + noise else None
    return Verdict(race.variant, speed_up, noise, race.warm_up_s, even, _memory_ratio(race))


def _memory_ratio(race: Race) -> float | None:
    """Compiled by eager; None where steps of one kind found what they needed still allocated by the other."""
    peaks = (race.eager_bytes or 0, race.compiled_bytes or 0)
    if min(peaks) <= _REUSED * max(peaks):
        return None
    return peaks[1] / peaks[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast steps go."""

    step_s: float
    """A step on the wall."""
    work_s: float
    """What of it counts as work: CPU seconds on a CPU."""
    wait_share: float
    """Share of the wall time in which the loop waited for data."""
    items_per_s: float
    """Samples per second on the wall."""
    items_per_work_s: float
    noise: float
    peak_bytes: int | None


def pace(steps: Sequence[Step], device: str) -> Pace:
    """The pace of typical steps: those that began an epoch or compiled something count only if all do."""
    chosen = [step for step in steps if not step.is_odd]
    if len(chosen) * 2 < len(steps):
        chosen = list(steps)
    wall_s = sum(step.wall_s for step in chosen)
    items = sum(step.num_items for step in chosen)
    works = [step.cpu_s if device == "cpu" else step.wall_s for step in chosen]
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    return Pace(
        step_s=statistics.median(step.wall_s for step in chosen),
        work_s=statistics.median(works),
        wait_share=sum(step.wait_s for step in chosen) / wall_s,
        items_per_s=items / wall_s,
        items_per_work_s=items / sum(works),
        noise=max(LEAST_GAIN, 2 * _error(works)),
        peak_bytes=max(peaks, default=None),
    )


def _error(values: Sequence[float]) -> float:
    """Standard error of the median, as a share of it, from the spread that outliers do not touch."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / math.sqrt(len(values)) / middle if middle else 0.0
