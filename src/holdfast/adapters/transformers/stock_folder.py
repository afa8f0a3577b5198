"""Folders `checkpoint-N` that the Trainer has written itself, checked before anything is loaded from one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.adapters.kit.saved_files import folder_fault, read_json

TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "pytorch_model_fsdp.bin",
    "pytorch_model_fsdp_0",
)
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0")


def step_of(path: str | Path) -> int | None:
    """Return N of a path that ends in `checkpoint-N`; None for another path."""
    match = _NAME.fullmatch(Path(path).name)
    return None if match is None else int(match[1])


def list_folders(output_dir: Path) -> list[tuple[int, Path]]:
    """Return step and path of each folder `checkpoint-N`, in ascending order."""
    found = [(step_of(path), path) for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


def has_weights(folder: Path) -> bool:
    """Return True if a folder has weights of a model, of any form."""
    return any(True for _ in _weights(folder))


def find_fault(folder: Path, *, world_size: int, with_training: bool = True) -> str | None:
    """Return why training cannot resume from a folder of the Trainer; None if it can.

    Args:
        folder: the folder `checkpoint-N`.
        world_size: number of ranks that resume, whose generators the folder has to have.
        with_training: the optimizer, the scheduler and the generators are needed too.
    """
    faults = _state_faults(folder)
    if with_training:
        faults = [*faults, *_training_faults(folder, world_size)]
    if not has_weights(folder):
        faults.append("it has no weights")
    if faults:
        return faults[0]
    return folder_fault(folder)


def _weights(folder: Path) -> Iterator[Path]:
    """Yield the files and folders with weights; adapters may be in folders of their own."""
    yield from (folder / name for name in _WEIGHTS if (folder / name).exists())
    yield from folder.glob("*/adapter_model.*")


def _state_faults(folder: Path) -> list[str]:
    state = read_json(folder / TRAINER_STATE)
    if not isinstance(state, dict):
        return [f"{TRAINER_STATE} is missing or damaged"]
    step = state.get("global_step")
    return [] if step == step_of(folder) else [f"{TRAINER_STATE} is of step {step}"]


def _training_faults(folder: Path, world_size: int) -> list[str]:
    faults = [] if any((folder / name).exists() for name in _OPTIMIZERS) else ["it has no optimizer"]
    if not (folder / "scheduler.pt").exists():
        faults.append("scheduler.pt is missing")
    if (folder / "rng_state.pth").exists():  # saved by one rank
        return faults
    missing = [
        name for rank in range(world_size) if not (folder / (name := f"rng_state_{rank}.pth")).exists()
    ]
    return [*faults, *(f"{name} is missing" for name in missing[:1])]
