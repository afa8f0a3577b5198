"""Measurements of profile runs, as plain values that can be stored as JSON."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source code."""

    file: str
    line: int
    code: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTiming:
    """Timing of one optimizer step, from the end of the previous one."""

    wall_s: float
    cpu_s: float
    wait_s: float
    """Part of `wall_s` spent waiting for the data loader."""
    num_items: int
    """Samples: first dimensions of the model's inputs, or the loader's batch sizes."""
    num_elements: int
    """Elements of the model's largest input, over all its calls."""
    peak_bytes: int | None = None
    """Peak of memory, if it can be measured."""
    is_odd: bool = False
    """The step started an epoch or compiled something, so it is not typical."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderInfo:
    """The data loader that feeds the steps."""

    index: int
    """Index among the script's loaders, in the order of their creation."""
    place: SourceLine | None
    """Line that created the loader."""
    sample_code: SourceLine | None
    """Line of the code that makes batches: the collate function, or the dataset."""
    batch_size: int | None
    """Batch size, or None for a custom sampler."""
    num_workers: int
    is_iterable: bool
    """The dataset is a stream, which each worker would read completely."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowLengths:
    """Lengths of the rows of the batches without padding."""

    rows: tuple[tuple[int, ...], ...]
    """Useful length of each row, batch by batch."""
    widths: tuple[int, ...]
    """Padded length of the rows of each batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepMeasurements:
    """Measurements of unmodified steps."""

    device: str
    steps: tuple[StepTiming, ...]
    call: SourceLine | None
    """Line that calls the model."""
    optimizer: str
    learning_rate: float | None
    """Learning rate of the first group; with a schedule, its initial value."""
    loader: LoaderInfo | None
    shapes: tuple[str, ...]
    """Shape of the model's largest input, step by step."""
    lengths: RowLengths | None
    compiled_at: SourceLine | None
    """Line that calls torch.compile, if any."""
    has_random: bool
    """The model draws random numbers in training, as dropout does."""
    num_blocks: int
    """Number of layers of the same class, which can be compiled separately."""
    in_place: bool = True
    """`model.compile()` compiles the model. For torch's own containers it compiles nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostSync:
    """A line that makes the host wait for the device."""

    kind: str
    place: SourceLine
    inside: SourceLine | None
    """Library line that waits on behalf of `place`."""
    num_steps: int
    """Number of watched steps with this sync."""
    num_times: int
    seconds: float
    """Total duration."""
    in_forward: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SyncMeasurements:
    """Measurements of host syncs."""

    device: str
    num_steps: int
    found: tuple[HostSync, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GraphBreak:
    """A line that breaks the model's graph."""

    place: SourceLine
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recompile:
    """A function that was recompiled, with the reasons."""

    place: SourceLine
    """First line of the function."""
    function: str
    num_times: int
    reasons: tuple[str, ...]
    hit_limit: bool
    """The compiler gave up, and the function runs eagerly."""
    is_shape: bool
    """Shapes of its inputs are the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphMeasurements:
    """Graphs, graph breaks and recompiles that the compiler's tracer produced for the model."""

    num_graphs: int
    """Graphs of the model for one batch."""
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    num_steps: int
    failure: str = ""
    """The compiler's error if it could not trace the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompileMeasurements:
    """Measurements of eager and compiled steps of one run, taken in turns."""

    variant: str
    device: str
    eager_s: tuple[float, ...]
    """Seconds of each step, per element if batches differ in size; CPU seconds on a CPU."""
    compiled_s: tuple[float, ...]
    warm_up_s: float
    """Cost of compiling beyond a compiled step; CPU seconds of all processes on a CPU."""
    step_s: float
    """Duration of a complete eager step, in the same unit."""
    eager_bytes: int | None
    """Peak memory of an eager step, beyond its start."""
    compiled_bytes: int | None
    losses: tuple[float, ...] = ()
    failure: str = ""
