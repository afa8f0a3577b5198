"""Folders that Accelerate has written itself, checked before anything is loaded from one."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from holdfast.adapters.kit.saved_files import folder_fault

_NUMBER = re.compile(r"([0-9]+)\D*$")
_AUTOMATIC = re.compile(r"checkpoint_([0-9]+)")
_MAX_DIGITS = 15
_MODELS = ("model", "pytorch_model")


def number_of(name: str) -> int | None:
    """Return the last number in a folder's name, such as 500 of "step_500"; None without one."""
    match = _NUMBER.search(name)
    return None if match is None or len(match[1]) > _MAX_DIGITS else int(match[1])


def automatic_number(name: str) -> int | None:
    """Return N of a folder `checkpoint_N`, as `automatic_checkpoint_naming` makes it; None for another."""
    match = _AUTOMATIC.fullmatch(name)
    return None if match is None else int(match[1])


def is_stock(folder: Path) -> bool:
    """Return True if Accelerate has written something into a folder."""
    return any(folder.glob("random_states_*.pkl")) or any(_models(folder))


def find_fault(folder: Path, *, ranks: Collection[int], num_optimizers: int) -> str | None:
    """Return why a state cannot be loaded from a folder of Accelerate; None if it can.

    Args:
        folder: the folder.
        ranks: ranks whose generators it has to have.
        num_optimizers: number of optimizers that it has to have.
    """
    if not any(_models(folder)):
        return "it has no model"
    needed = [f"random_states_{rank}.pkl" for rank in ranks]
    if not any(folder.glob("optimizer_0")):  # a folder of FSDP
        needed += [f"optimizer{f'_{number}' if number else ''}.bin" for number in range(num_optimizers)]
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        return f"{missing[0]} is missing"
    return folder_fault(folder)


def _models(folder: Path) -> list[Path]:
    return [path for name in _MODELS for path in sorted(folder.glob(f"{name}*"))]
