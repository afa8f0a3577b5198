"""Measurements of profile runs, as plain values that can be stored as JSON, and verdicts on them; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

QUESTIONS = ("syncs", "compile", "shapes", "input")


class SourceLine(Struct, frozen=True):
    """A line of source code."""

    file: str
    line: int
    code: str = ""


class StepTiming(Struct, frozen=True):
    """Timing of one optimizer step, from the end of the previous one."""

    wall_s: float
    cpu_s: float
    wait_s: float  # part of `wall_s` spent waiting for the data loader
    num_items: int  # samples: first dimensions of the model's inputs, or the loader's batch sizes
    is_odd: bool = False  # the step started an epoch or compiled something, so it is not typical


class LoaderInfo(Struct, frozen=True):
    """The data loader that feeds the steps."""

    index: int  # index among the script's loaders, in the order of their creation
    place: SourceLine | None  # line that created the loader
    sample_code: SourceLine | None
    """Line of the code that makes batches: the collate function, or the dataset."""
    num_workers: int
    is_iterable: bool  # the dataset is a stream, which each worker would read completely


class RowLengths(Struct, frozen=True):
    """Lengths of the rows of the batches without padding."""

    rows: tuple[tuple[int, ...], ...]  # useful length of each row, batch by batch
    widths: tuple[int, ...]  # padded length of the rows of each batch


class StepMeasurements(Struct, frozen=True, tag=True):
    """Measurements of unmodified steps."""

    device: str
    steps: tuple[StepTiming, ...]
    call: SourceLine | None  # line that calls the model
    loader: LoaderInfo | None
    shapes: tuple[str, ...]  # shape of the model's largest input, step by step
    lengths: RowLengths | None
    compiled_at: SourceLine | None  # line that calls torch.compile, if any
    has_random: bool  # the model draws random numbers in training, as dropout does
    num_blocks: int  # number of layers of the same class, which can be compiled separately
    in_place: bool = True
    """`model.compile()` compiles the model. For torch's own containers it compiles nothing."""


class HostSync(Struct, frozen=True):
    """A line that makes the host wait for the device."""

    kind: str
    place: SourceLine
    inside: SourceLine | None  # library line that waits on behalf of `place`
    num_steps: int  # number of watched steps with this sync
    num_times: int
    seconds: float  # total duration
    in_forward: bool


class SyncMeasurements(Struct, frozen=True, tag=True):
    """Measurements of host syncs."""

    device: str
    num_steps: int
    found: tuple[HostSync, ...]


class GraphBreak(Struct, frozen=True):
    """A line that breaks the model's graph."""

    place: SourceLine
    reason: str


class Recompile(Struct, frozen=True):
    """A function that was recompiled, with the reasons."""

    place: SourceLine  # first line of the function
    function: str
    num_times: int
    reasons: tuple[str, ...]
    hit_limit: bool  # the compiler gave up, and the function runs eagerly
    is_shape: bool  # shapes of its inputs are the reason


class GraphMeasurements(Struct, frozen=True, tag=True):
    """Graphs, graph breaks and recompiles that the compiler's tracer produced for the model."""

    num_graphs: int  # graphs of the model for one batch
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    num_steps: int
    failure: str = ""  # the compiler's error if it could not trace the model


class CompileMeasurements(Struct, frozen=True, tag=True):
    """Measurements of eager and compiled steps of one run, taken in turns."""

    variant: str
    eager_s: tuple[float, ...]
    """Seconds of each step, per element if batches differ in size; CPU seconds on a CPU."""
    compiled_s: tuple[float, ...]
    warm_up_s: float  # cost of compiling beyond a compiled step; CPU seconds of all processes on a CPU
    step_s: float  # duration of a complete eager step, in the same unit
    eager_bytes: int | None  # peak memory of an eager step, beyond its start
    compiled_bytes: int | None


class RunFailure(Struct, frozen=True, tag=True):
    """Failure of a run, with its reason."""

    reason: str


Measurements = StepMeasurements | SyncMeasurements | GraphMeasurements | CompileMeasurements
"""Result of a run, by its question."""

NAMES = {
    "whole": "the whole model",
    "blocks": "each block",
    "random": "the whole model with eager's random numbers",
    "own": "as the script does",
    "own random": "as the script does, with eager's random numbers",
}
"""Name of each way to compile."""
MIN_GAIN = 0.03  # smallest difference that counts. Steps of the same program differ by 3 to 4 %
_REUSED = 0.1  # no compiler saves nine tenths of a step's memory; such a difference comes from the allocator


class CompileVerdict(Struct, frozen=True):
    """Verdict on one way to compile."""

    variant: str
    speed_up: float  # eager time of a step divided by its compiled time
    noise: float  # relative differences up to this value are noise
    warm_up_s: float
    break_even_steps: int | None  # steps after which the warm-up has paid off. None means never
    memory_ratio: float | None  # additional peak memory of a compiled step, divided by that of an eager one
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
    if len(race.eager_s) < 2 or len(race.compiled_s) < 2:
        why = "too few steps without compilation"
        return CompileVerdict(race.variant, 0.0, 0.0, race.warm_up_s, None, None, why)
    eager, compiled = statistics.median(race.eager_s), statistics.median(race.compiled_s)
    noise = max(MIN_GAIN, 2 * math.hypot(_error(race.eager_s), _error(race.compiled_s)))
    speed_up = eager / compiled
    saved_s = race.step_s * (1 - 1 / speed_up)
    even = math.ceil(race.warm_up_s / saved_s) if speed_up > 1 + noise else None
    peaks = race.eager_bytes or 0, race.compiled_bytes or 0
    has_reused = min(peaks) <= _REUSED * max(peaks)  # one kind of steps the allocations of the other
    memory_ratio = None if has_reused else peaks[1] / peaks[0]
    return CompileVerdict(race.variant, speed_up, noise, race.warm_up_s, even, memory_ratio)


class Throughput(Struct, frozen=True):
    """Speed of the steps."""

    step_s: float  # wall time of a step
    work_s: float  # work of a step: CPU seconds on a CPU, otherwise wall time
    wait_share: float  # share of the wall time spent waiting for data
    items_per_s: float  # samples per second of wall time
    noise: float


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
    return Throughput(
        step_s=statistics.median(step.wall_s for step in chosen),
        work_s=statistics.median(works),
        wait_share=sum(step.wait_s for step in chosen) / wall_s,
        items_per_s=items / wall_s,
        noise=max(MIN_GAIN, 2 * _error(works)),
    )


def _error(values: Sequence[float]) -> float:
    """Return the relative standard error of the median, robust to outliers."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / math.sqrt(len(values)) / middle if middle else 0.0
