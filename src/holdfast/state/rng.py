"""Random number generators: the process-wide ones, and single ones in a state."""

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
from holdfast.state.capture import TensorCollector
from holdfast.state.replication import Replication

KEY = "rng"
"""Top-level key of the process-wide generators."""
_CPU, _CUDA = f"{KEY}.torch", f"{KEY}.cuda"


def capture(collector: TensorCollector) -> dict[str, Any]:
    """Collect the states of the process-wide generators.

    Those of python, numpy (if imported), torch, and the current CUDA device.
    """
    values: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "python": python_state(random),
        "torch": _emit(collector, _CPU, torch.get_rng_state()),
    }
    if numpy := sys.modules.get("numpy"):
        values["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        values["cuda"] = _emit(collector, _CUDA, torch.cuda.get_rng_state())
    return encode(values, KEY)


def _emit(collector: TensorCollector, name: str, state: torch.Tensor) -> TensorRef:
    collector.add(name, state, Replication.OWN)
    return TensorRef(name)


def restore(values: dict[str, Any]) -> list[str]:
    """Set all process-wide generators; return notes on those that could not be set.

    Args:
        values: decoded, with tensors inserted.
    """
    set_python_state(random, values["python"])
    torch.set_rng_state(values["torch"].cpu())
    notes = []
    if "numpy" in values:
        if numpy := sys.modules.get("numpy"):
            numpy.random.set_state(values["numpy"])
        else:
            notes.append("rng: the checkpoint has a numpy state, but numpy is not imported; it was skipped.")
    if "cuda" in values:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(values["cuda"].cpu())
        else:
            notes.append("rng: the checkpoint has a CUDA state, but CUDA is not available; it was skipped.")
    return notes


def derive(values: dict[str, Any], *, rank: int, world_size: int) -> str:
    """Seed all process-wide generators from another rank's saved state; return a note on it.

    The seed is a hash of the saved torch seed and state, the rank and the world size: two ranks never get the
    same stream, the same restore always gives the same streams, and no earlier stream is repeated.
    """
    facts = f"{values['seed']}/{rank}/{world_size}/".encode() + bytes(view_bytes(values["torch"].cpu()))
    seed = int.from_bytes(hashlib.sha256(facts).digest()[:8], "little")
    random.seed(seed)
    torch.manual_seed(seed)  # seeds CUDA too
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)
    return (
        f"rng: the checkpoint does not have generator states of rank {rank} of {world_size}, so its "
        f"generators were seeded with {seed}, derived from the saved ones. Random numbers differ from an "
        "uninterrupted run."
    )


def python_state(generator: Any) -> dict[str, Any]:
    """Return the state of a `random.Random` (or of the module `random`) as values.

    Raises:
        InvalidInput: the generator has no state, such as `random.SystemRandom`.
    """
    try:
        version, words, gauss = generator.getstate()
    except NotImplementedError as error:
        raise InvalidInput(
            f"A {type(generator).__qualname__} does not have a state to save. Nothing was written. "
            "Leave it out of the state, or use a random.Random."
        ) from error
    return {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss}


def set_python_state(generator: Any, state: dict[str, Any]) -> None:
    """Set a `random.Random` (or the module `random`) to a state from `python_state`."""
    words = struct.unpack(f"<{len(state['words']) // 4}I", state["words"])
    generator.setstate((state["version"], words, state["gauss"]))
