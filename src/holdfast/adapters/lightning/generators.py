"""Random number generators of a process, as values that torch.load accepts with `weights_only`."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from holdfast.checkpoint.state.rng import python_state, set_python_state


def capture_generators() -> dict[str, Any]:
    """Return the states of python's, torch's and numpy's generators, and of the current CUDA device."""
    states: dict[str, Any] = {"python": python_state(random), "torch": torch.get_rng_state()}
    states["python"]["words"] = _as_tensor(states["python"]["words"])
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = _pack(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Set the generators to states from `capture_generators`."""
    python = {**states["python"], "words": states["python"]["words"].cpu().numpy().tobytes()}
    set_python_state(random, python)
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy  # here, since a script may do without it

        numpy.random.set_state(_unpack(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pack(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of numpy with a tensor in place of its array."""
    inner = dict(state["state"])
    inner["key"] = torch.from_numpy(inner["key"].astype("int64"))
    return {**state, "state": {**inner, "pos": int(inner["pos"])}}


def _unpack(state: dict[str, Any]) -> dict[str, Any]:
    inner = {**state["state"], "key": state["state"]["key"].cpu().numpy().astype("uint32")}
    return {**state, "state": inner}
