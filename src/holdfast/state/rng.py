"""Random number generators: the process-wide ones, and single ones that a user puts into the state."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from typing import Any

import torch

from holdfast.errors import InvalidInput
from holdfast.format.values import TensorRef, encode
from holdfast.rawbytes import view_bytes
from holdfast.state.capture import Sink
from holdfast.state.spread import Spread

KEY = "rng"
"""Top-level key of the process-wide generators."""
_CPU, _CUDA = f"{KEY}.torch", f"{KEY}.cuda"


def capture(sink: Sink) -> dict[str, Any]:
    """Take the process-wide generators' states: python, numpy (if imported), torch, current CUDA device."""
    values: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "python": python_state(random),
        "torch": _emit(sink, _CPU, torch.get_rng_state()),
    }
    if numpy := sys.modules.get("numpy"):
        values["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        values["cuda"] = _emit(sink, _CUDA, torch.cuda.get_rng_state())
    return encode(values, KEY)


def _emit(sink: Sink, name: str, state: torch.Tensor) -> TensorRef:
    sink.add(name, state, Spread.OWN)
    return TensorRef(name)


def restore(values: dict[str, Any]) -> list[str]:
    """Set all process-wide generators; answers notes on those that could not be.

    Args:
        values: decoded, with the tensors in their places.
    """
    set_python_state(random, values["python"])
    torch.set_rng_state(values["torch"].cpu())
    notes = []
    if "numpy" in values:
        if numpy := sys.modules.get("numpy"):
            numpy.random.set_state(values["numpy"])
        else:
            notes.append("rng: the checkpoint has a numpy state, but numpy is not imported; it was left out.")
    if "cuda" in values:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(values["cuda"].cpu())
        else:
            notes.append("rng: the checkpoint has a CUDA state, but there is no CUDA here; it was left out.")
    return notes


def derive(values: dict[str, Any], *, rank: int, world_size: int) -> str:
    """Seed all process-wide generators from another rank's saved state; answers a note on it.

    The seed is a hash of the saved torch seed and state, the rank and the world size: two ranks never get
    the same stream, the same restore always gives the same streams, and no stream of earlier steps returns.
    """
    facts = f"{values['seed']}/{rank}/{world_size}/".encode() + bytes(view_bytes(values["torch"].cpu()))
    seed = int.from_bytes(hashlib.sha256(facts).digest()[:8], "little")
    random.seed(seed)
    torch.manual_seed(seed)  # seeds CUDA too
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)
    return (
        f"rng: the checkpoint has no generator states of rank {rank} of {world_size}, so its generators were "
        f"seeded with {seed}, derived from the saved ones; random numbers differ from an uninterrupted run."
    )


def python_state(generator: Any) -> dict[str, Any]:
    """State of a `random.Random` (or of the module `random`) as values.

    Raises:
        InvalidInput: a generator that has no state to save, such as `random.SystemRandom`.
    """
    try:
        version, words, gauss = generator.getstate()
    except NotImplementedError as error:
        message = (
            f"A {type(generator).__qualname__} has no state that could be saved; leave it out of the state."
        )
        raise InvalidInput(message) from error
    return {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss}


def set_python_state(generator: Any, state: dict[str, Any]) -> None:
    """Set a `random.Random` (or the module `random`) to what `python_state` gave."""
    words = struct.unpack(f"<{len(state['words']) // 4}I", state["words"])
    generator.setstate((state["version"], words, state["gauss"]))
