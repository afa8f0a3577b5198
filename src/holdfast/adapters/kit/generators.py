"""Random number generators of a process: their states, captured and set."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from holdfast.checkpoint.state.rng import python_state, set_python_state


def capture_generators() -> dict[str, Any]:
    """Return the states of python's, torch's and numpy's generators, and of the current CUDA device."""
    states: dict[str, Any] = {"python": python_state(random), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Set the generators to states from `capture_generators`."""
    set_python_state(random, states["python"])
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy  # here, since a script may do without it

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def tensor_of(data: bytes) -> torch.Tensor:
    """Return the state of a generator that was saved as bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(state: torch.Tensor) -> bytes:
    """Return the state of a generator as bytes."""
    return state.cpu().numpy().tobytes()
