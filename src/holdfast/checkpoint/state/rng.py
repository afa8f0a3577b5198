"""Random number generators: the process-wide ones, and single ones in a state."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

from holdfast.checkpoint.format.values import TensorRef
from holdfast.checkpoint.state.entry import Replication
from holdfast.checkpoint.state.load import Load, LoadPhase
from holdfast.checkpoint.state.tensor_table import Role, TensorTable
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.rawbytes import view_bytes

KEY = "rng"  # top-level key of the process-wide generators
_NUMPY_KINDS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
"""Errors that generators raise for a state which is not one of theirs."""


def process_states() -> dict[str, Any]:
    """Return the states of the generators of python, numpy (if imported), torch and the current device."""
    values = {"seed": torch.initial_seed(), "python": python_state(random), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        values["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        values["cuda"] = torch.cuda.get_rng_state()
    return values


def capture(table: TensorTable) -> dict[str, Any]:
    """Collect the states of all process-wide generators in a table."""
    return table.encode(process_states(), KEY, Role(Replication.OWN))


def plan(load: Load, rank: int, world_size: int, *, own_rank: bool) -> None:
    """Plan to restore the process-wide generators, or to seed them from another rank's saved states."""
    tree = load.values(KEY)
    if tree is None:
        load.generator_notes.append("rng: the checkpoint has no generator states; the current ones are kept.")
        return
    check(tree)
    make = load.read_tree(tree)

    def finish() -> None:
        values = make()
        notes = restore(values) if own_rank else [derive(values, rank=rank, world_size=world_size)]
        load.generator_notes.extend(notes)

    load.add_step(LoadPhase.RNG, finish)


def check(values: Any) -> None:
    """Set new generators to decoded saved states, before anything live changes."""
    try:
        set_python_state(random.Random(), values["python"])
        kind = values["numpy"]["bit_generator"] if "numpy" in values else None
        if kind in _NUMPY_KINDS and (numpy := sys.modules.get("numpy")):  # a kind of others has no new one
            _set_numpy(numpy.random.RandomState(), values["numpy"])
        tensors = [values["torch"], *([values["cuda"]] if "cuda" in values else [])]
        is_known = type(values["seed"]) is int and {TensorRef}.issuperset(map(type, tensors))
    except MISFITS as error:
        raise Corrupt(f"{KEY}: a saved state of a random number generator is damaged: {error!r}.") from error
    if not is_known:
        raise Corrupt(f"{KEY}: a saved state of a random number generator is missing.")


def restore(values: dict[str, Any]) -> list[str]:
    """Set all process-wide generators to checked states; return notes on those that could not be set."""
    notes: list[str] = []
    numpy = sys.modules.get("numpy")
    setters: list[tuple[str, Callable[[], object]]] = [
        ("python", lambda: set_python_state(random, values["python"])),
        ("torch", lambda: torch.set_rng_state(values["torch"].cpu())),
    ]
    if "numpy" in values and numpy is not None:
        setters.append(("numpy", lambda: _set_numpy(numpy.random.mtrand._rand, values["numpy"])))
    elif "numpy" in values:
        notes.append("rng: the checkpoint has a numpy state, but numpy is not imported; it was skipped.")
    if "cuda" in values and torch.cuda.is_available():
        setters.append(("CUDA", lambda: torch.cuda.set_rng_state(values["cuda"].cpu())))
    elif "cuda" in values:
        notes.append("rng: the checkpoint has a CUDA state, but CUDA is not available; it was skipped.")
    for name, set_state in setters:
        try:
            set_state()
        except MISFITS as error:
            notes.append(f"rng: the saved state does not fit the {name} generator ({error}); it was skipped.")
    return notes


def _set_numpy(generator: Any, state: Any) -> None:
    """Set a numpy RandomState, whose bit generator is replaced by the kind that was saved."""
    numpy, kind = sys.modules["numpy"], state["bit_generator"]
    if kind in _NUMPY_KINDS and kind != generator.get_state(legacy=False)["bit_generator"]:
        new = getattr(numpy.random, kind)()
        if generator is numpy.random.mtrand._rand:
            numpy.random.set_bit_generator(new)
        else:
            generator = numpy.random.RandomState(new)
    generator.set_state(state)


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


def state_of(generator: Any) -> Any:
    """Return the state of a generator of torch, which is a tensor, or of python or numpy, as values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return python_state(generator)
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state from `state_of`; raise one of `MISFITS` if it does not fit."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        set_python_state(generator, state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def python_state(generator: Any) -> dict[str, Any]:
    """Return the state of a `random.Random` (or of the module `random`) as values."""
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
