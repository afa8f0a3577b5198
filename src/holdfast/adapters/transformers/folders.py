"""Folders `checkpoint-N` of a Trainer: those that refer to a home, and its own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from transformers import Trainer

from holdfast.adapters.kit.saved_files import folder_fault, read_json
from holdfast.adapters.transformers.state import MODEL
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.exporter import map_weights
from holdfast.checkpoint.exchange.trainer_export import write_training_files
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.errors import NotFound
from holdfast.system.linux.partial_files import remove_folder, remove_partial_files
from holdfast.system.log import get_logger

TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = (
    *("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"),
    "*/adapter_model.*",  # of several adapters
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
    return any(any(folder.glob(name)) for name in _WEIGHTS)


def find_fault(folder: Path, *, world_size: int, with_training: bool = True) -> str | None:
    """Return why training cannot resume from a folder of the Trainer; None if it can."""
    if not folder.is_dir():
        return "the folder does not exist"
    return next(_faults(folder, world_size, with_training=with_training), None) or folder_fault(folder)


class _TrainerState(Struct):
    global_step: Any = None


def _faults(folder: Path, world_size: int, *, with_training: bool) -> Iterator[str]:
    state = read_json(folder / TRAINER_STATE, _TrainerState)
    if state is None:
        yield f"{TRAINER_STATE} is missing or damaged"
    elif state.global_step != step_of(folder):
        yield f"{TRAINER_STATE} is of step {state.global_step}"
    if with_training:
        if not any((folder / name).exists() for name in _OPTIMIZERS):
            yield "it has no optimizer"
        needed = ["scheduler.pt"]
        if not (folder / "rng_state.pth").exists():  # else it was saved by one rank
            needed += [f"rng_state_{rank}.pth" for rank in range(world_size)]
        yield from (f"{name} is missing" for name in needed if not (folder / name).exists())
    if not has_weights(folder):
        yield "it has no weights"


HOME_FILE = "holdfast.json"
"""File that names the home of the checkpoint whose folder it is in."""
_CONFIGS = ("config", "generation_config")
_OURS = {HOME_FILE, TRAINER_STATE, *(f"{name}.json" for name in _CONFIGS)}


class _Reference(Struct):
    home: str


class Folders:
    """Folders `checkpoint-N` in a Trainer's output directory.

    They are there for everything that expects them: `get_last_checkpoint`, callbacks that add files of their
    own, and `resume_from_checkpoint=PATH`. A checkpoint exists when it is complete in home, with or without
    its folder.
    """

    def __init__(self, output_dir: str, home: str, *, writes: bool) -> None:
        self.output_dir, self._home, self._writes = output_dir, home, writes

    def path(self, step: int) -> str:
        """Return the path of a step's folder."""
        return str(Path(self.output_dir) / f"checkpoint-{step}")

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in ascending order."""
        return [step for step, _ in list_folders(Path(self.output_dir))]

    def make(self, step: int, state: str, model: Any, *, home: str | None = None) -> None:
        """Make the folder of a step, with the Trainer's state and the model's configuration."""
        if not self._writes:
            return
        folder = Path(self.path(step))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HOME_FILE).write_text(json.dumps({"home": home or self._home}) + "\n")
        (folder / TRAINER_STATE).write_text(state)  # not atomic: it is written again when training resumes
        for name in _CONFIGS:
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)

    def make_readable(self, step: int, state: str) -> None:
        """Write the Trainer's state, unless this rank sees the one that was written."""
        file = Path(self.path(step), TRAINER_STATE)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(state)

    def remove(self, step: int) -> None:
        """Remove the folder of a step, whatever it contains."""
        if self._writes:
            remove_folder(Path(self.path(step)))

    def remove_interrupted(self, after: int, complete: Collection[int]) -> None:
        """Remove folders of interrupted saves and deletions, which nothing may take for checkpoints."""
        if self._writes:
            remove_partial_files(Path(self.output_dir))
        for step, folder in list_folders(Path(self.output_dir)):
            is_older = step <= after and self.home_of(str(folder)) != self._home
            if step == after or step in complete or is_older:
                continue
            if {one.name for one in folder.iterdir()} <= _OURS:
                self.remove(step)

    def home_of(self, path: str) -> str | None:
        """Return the home that a folder `checkpoint-N` names; None if the Trainer has written it itself."""
        reference = read_json(Path(path) / HOME_FILE, _Reference)
        return None if reference is None else reference.home

    def is_here(self, path: str) -> bool:
        """Return True if a path is that of a folder `checkpoint-N` in the output directory."""
        same = Path(path).absolute().parent.resolve() == Path(self.output_dir).absolute().resolve()
        return same and step_of(path) is not None


def surplus(steps: Sequence[int], *, limit: int | None, best: int | None) -> list[int]:
    """Return the steps to delete, oldest first, so that `limit` of them are left.

    The newest one and the best one are always left, as by the Trainer's own rule.
    """
    if not limit or limit < 0 or len(steps) <= limit:
        return []
    protected = {steps[-1], best} & set(steps)
    num_left = max(limit, len(protected))
    return [step for step in steps if step not in protected][: len(steps) - num_left]


_log = get_logger("adapters")


def write_folder(trainer: Trainer, home: str, step: int, folder: str) -> None:
    """Write the folder of a step, for `from_pretrained` and for a Trainer without Holdfast."""
    try:
        checkpoint = open_checkpoint(home, step)
    except NotFound:  # the step is only in a local folder
        _log.warning("%s was not written, because %s does not have step %d", folder, home, step)
        return
    everything = ExportSelection(checkpoint)
    write_training_files(everything, Path(folder), overwrite=True)
    trainer._save(folder, state_dict=map_weights(checkpoint, MODEL, Path(folder)))
