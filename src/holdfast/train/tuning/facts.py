"""What rehearsals of a training have seen, as plain values that survive a trip through JSON."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A line of somebody's code."""

    file: str
    line: int
    code: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: from the end of the one before to its own."""

    wall_s: float
    cpu_s: float
    wait_s: float
    """Part of `wall_s` in which the loop waited for its data loader."""
    num_items: int
    """Samples: the sizes of the first dimension of what the model was given, or of the loader's batches."""
    num_elements: int
    """Elements of the largest tensor that the model was given, in all its calls."""
    peak_bytes: int | None = None
    """Greatest memory in use, where that can be told."""
    is_odd: bool = False
    """It began an epoch or compiled something, so it stands for no other step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loader:
    """The data loader that feeds the steps."""

    index: int
    """Which of the loaders that the script makes, in their order."""
    place: Place | None
    """Where it was made."""
    making: Place | None
    """Where batches are made of samples: the collate function, or the dataset."""
    batch_size: int | None
    """None if a sampler of the user's own decides."""
    num_workers: int
    is_iterable: bool
    """Its dataset is a stream, which each worker would read as a whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """How much of each row of the batches is no padding."""

    rows: tuple[tuple[int, ...], ...]
    """Useful length of each row, batch by batch."""
    widths: tuple[int, ...]
    """Length to which the rows of each batch are padded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """What plain steps show."""

    device: str
    steps: tuple[Step, ...]
    call: Place | None
    """Where the script calls its model."""
    optimizer: str
    learning_rate: float | None
    """Of the first group; where there is a schedule, the rate that it begins from."""
    loader: Loader | None
    shapes: tuple[str, ...]
    """Shape of the largest tensor that the model was given, step by step."""
    lengths: Lengths | None
    compiled_at: Place | None
    """Where the script calls torch.compile, if it does."""
    has_random: bool
    """The model draws random numbers as it trains: dropout."""
    num_blocks: int
    """Layers of the same class that can be compiled one by one."""
    in_place: bool = True
    """`model.compile()` compiles the model; of torch's own containers it compiles nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sync:
    """A line that makes the host wait for the device."""

    kind: str
    place: Place
    inside: Place | None
    """The line of a library that did it on behalf of `place`."""
    num_steps: int
    """In how many of the watched steps it was met."""
    num_times: int
    seconds: float
    """How long it took, in all."""
    in_forward: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Syncs:
    """What the watcher of host syncs has seen."""

    device: str
    num_steps: int
    found: tuple[Sync, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Break:
    """A line at which the compiler has to cut the model's graph."""

    place: Place
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recompile:
    """A function that the compiler has translated anew, and why."""

    place: Place
    """Where the function begins."""
    function: str
    num_times: int
    reasons: tuple[str, ...]
    hit_limit: bool
    """It was given up, and runs uncompiled from then on."""
    is_shape: bool
    """Shapes of its inputs made it so."""


@dataclasses.dataclass(frozen=True, slots=True)
class Graphs:
    """What the compiler's first half, which only traces, makes of the model."""

    num_graphs: int
    """Graphs of the model for one batch."""
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    num_steps: int
    failure: str = ""
    """What the compiler said if it could not trace the model at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Race:
    """Eager and compiled steps of one run, taken in turns."""

    variant: str
    device: str
    eager_s: tuple[float, ...]
    """Seconds of each step, per element where batches differ in size; CPU seconds on a CPU."""
    compiled_s: tuple[float, ...]
    warm_up_s: float
    """What compiling cost beyond a compiled step, CPU seconds of all processes on a CPU."""
    step_s: float
    """An eager step, in the same seconds, whole."""
    eager_bytes: int | None
    """Memory that an eager step needs at its peak, beyond what it began with."""
    compiled_bytes: int | None
    losses: tuple[float, ...] = ()
    failure: str = ""


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    return dataclasses.asdict(value)


def revive(kind: type[T], data: Mapping[str, Any]) -> T:
    """The value of a dataclass from what `plain` and JSON have made of it."""
    hints = get_type_hints(kind)
    fields = {name: _revived(hints[name], value) for name, value in data.items() if name in hints}
    return kind(**fields)


def _revived(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        return tuple(_revived(get_args(hint)[0], one) for one in value)
    return revive(hint, value) if dataclasses.is_dataclass(hint) else value  # type: ignore[arg-type]
