"""Parts of a position in the data: batches that divide themselves, and random number generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sized
from typing import Any, Protocol, runtime_checkable

import torch

from holdfast.checkpoint.state.rng import process_states, set_python_state


@runtime_checkable
class DividedBatches(Iterable[list[Any]], Sized, Protocol):
    """This rank's share of each global batch, with a position that continues on any number of ranks.

    An iteration yields the batches of an epoch, and the length is their number.
    """

    rank: int
    world_size: int
    batch_size: int
    accumulation_steps: int

    def complete_steps(self, num_steps: int) -> None:
        """Count optimizer steps that were completed since the last call."""

    def skip(self, start: int, stop: int) -> None:
        """Leave out a range of units."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""


def capture_process() -> dict[str, Any]:
    """Return the states of python's, torch's and numpy's generators, and of the current CUDA device."""
    states = process_states()
    del states["seed"]
    return {name: bytes_of(one) if isinstance(one, torch.Tensor) else one for name, one in states.items()}


def set_process(states: dict[str, Any]) -> None:
    """Set the generators to states from `capture_process`."""
    set_python_state(random, states["python"])
    torch.set_rng_state(tensor_of(states["torch"]))
    if "numpy" in states:
        import numpy  # here, since a script may do without it

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor_of(states["cuda"]))


def tensor_of(data: bytes) -> torch.Tensor:
    """Return the state of a generator that was saved as bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(state: torch.Tensor) -> bytes:
    """Return the state of a generator as bytes."""
    return state.cpu().numpy().tobytes()


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers own, each once, without the process-wide one."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    inner = [getattr(one, "sampler", None) for one in samplers]
    found = [getattr(owner, "generator", None) for owner in (loader, *samplers, *inner)]
    owned = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return [one for one in owned.values() if one is not torch.default_generator]


def prepare_undivided(accelerator: Any, loader: Any, *, on_device: bool | None = None) -> Any:
    """Prepare a loader for Accelerate whose batches divide the data among the ranks themselves."""
    from accelerate.data_loader import prepare_data_loader  # here, since not every trainer needs Accelerate

    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=accelerator.device_placement if on_device is None else on_device,
        rng_types=list(accelerator.rng_types or ()),
        dispatch_batches=False,
        non_blocking=accelerator.non_blocking,
    )
