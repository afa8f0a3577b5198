"""Verdicts on measurements: whether compiling pays, and whether a difference exceeds the noise; pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from holdfast.train.tuning.measurements import CompileMeasurements, StepTiming

MIN_GAIN = 0.03
"""Smallest difference that counts. Steps of the same program differ by 3 to 4 %."""
_REUSED = 0.1  # no compiler saves nine tenths of a step's memory; such a difference comes from the allocator


@dataclasses.dataclass(frozen=True, slots=True)
class CompileVerdict:
    """Verdict on one way to compile."""

    variant: str
    speed_up: float
    """Eager time of a step divided by its compiled time."""
    noise: float
    """Relative differences up to this value are noise."""
    warm_up_s: float
    break_even_steps: int | None
    """Steps after which the warm-up has paid off. None means never."""
    memory_ratio: float | None
    """Additional peak memory of a compiled step, divided by that of an eager one."""
    failure: str = ""

    @property
    def pays(self) -> bool:
        """True if it is faster by more than the noise."""
        return not self.failure and self.speed_up > 1 + self.noise

    @property
    def is_idle(self) -> bool:
        """True if it has a warm-up, but its steps are not faster."""
        return not self.failure and self.speed_up < 1 + MIN_GAIN and self.warm_up_s > 0

    @property
    def costs(self) -> bool:
        """True if it is slower by more than the noise."""
        return not self.failure and self.speed_up < 1 - self.noise


def judge_compile(race: CompileMeasurements) -> CompileVerdict:
    """Return the verdict on a comparison of compiled and eager steps."""
    if race.failure or len(race.eager_s) < 2 or len(race.compiled_s) < 2:
        why = race.failure or "too few steps without compilation"
        return CompileVerdict(race.variant, 0.0, 0.0, race.warm_up_s, None, None, why)
    eager, compiled = statistics.median(race.eager_s), statistics.median(race.compiled_s)
    noise = max(MIN_GAIN, 2 * math.hypot(_error(race.eager_s), _error(race.compiled_s)))
    speed_up = eager / compiled
    saved_s = race.step_s * (1 - 1 / speed_up)
    even = math.ceil(race.warm_up_s / saved_s) if speed_up > 1 + noise else None
    return CompileVerdict(race.variant, speed_up, noise, race.warm_up_s, even, _memory_ratio(race))


def _memory_ratio(race: CompileMeasurements) -> float | None:
    """Return compiled by eager memory. None if one kind reused the other's allocations."""
    peaks = (race.eager_bytes or 0, race.compiled_bytes or 0)
    if min(peaks) <= _REUSED * max(peaks):
        return None
    return peaks[1] / peaks[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """Speed of the steps."""

    step_s: float
    """Wall time of a step."""
    work_s: float
    """Work of a step: CPU seconds on a CPU, otherwise wall time."""
    wait_share: float
    """Share of the wall time spent waiting for data."""
    items_per_s: float
    """Samples per second of wall time."""
    items_per_work_s: float
    noise: float
    peak_bytes: int | None


def measure_throughput(steps: Sequence[StepTiming], device: str) -> Throughput:
    """Return the throughput of typical steps.

    Steps that start an epoch or compile something are left out, unless they are the majority.
    """
    chosen = [step for step in steps if not step.is_odd]
    if len(chosen) * 2 < len(steps):
        chosen = list(steps)
    wall_s = sum(step.wall_s for step in chosen)
    items = sum(step.num_items for step in chosen)
    works = [step.cpu_s if device == "cpu" else step.wall_s for step in chosen]
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    return Throughput(
        step_s=statistics.median(step.wall_s for step in chosen),
        work_s=statistics.median(works),
        wait_share=sum(step.wait_s for step in chosen) / wall_s,
        items_per_s=items / wall_s,
        items_per_work_s=items / sum(works),
        noise=max(MIN_GAIN, 2 * _error(works)),
        peak_bytes=max(peaks, default=None),
    )


def _error(values: Sequence[float]) -> float:
    """Return the relative standard error of the median, robust to outliers."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / math.sqrt(len(values)) / middle if middle else 0.0
