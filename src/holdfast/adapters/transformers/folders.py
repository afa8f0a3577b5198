"""Folders `checkpoint-N` of a Trainer: referring to a home or its own, and the choice to resume from."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer

from holdfast.adapters.kit.run import TrainerRun
from holdfast.adapters.kit.saved_files import folder_fault, read_json
from holdfast.adapters.transformers.live_state import MODEL
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.exporter import map_weights
from holdfast.checkpoint.exchange.trainer_export import write_training_files
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput, NotFound
from holdfast.system.linux.partial_files import remove_folder, remove_partial_files
from holdfast.system.log import get_logger

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


HOME_FILE = "holdfast.json"
"""File that names the home of the checkpoint whose folder it is in."""
_CONFIGS = ("config", "generation_config")
_OURS = {HOME_FILE, TRAINER_STATE, *(f"{name}.json" for name in _CONFIGS)}


class Folders:
    """Folders `checkpoint-N` in a Trainer's output directory.

    They are there for everything that expects them: `get_last_checkpoint`, callbacks that add files of their
    own, and `resume_from_checkpoint=PATH`. A checkpoint exists when it is complete in home, with or without
    its folder.

    Args:
        output_dir: the Trainer's.
        home: URL of the run's home.
        writes: this rank writes the folders, as it would write the Trainer's own ones.
    """

    def __init__(self, output_dir: str, home: str, *, writes: bool) -> None:
        self.output_dir = output_dir
        self._home = home
        self._writes = writes

    def path(self, step: int) -> str:
        """Return the path of a step's folder."""
        return str(Path(self.output_dir) / f"checkpoint-{step}")

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in ascending order."""
        return [step for step, _ in list_folders(Path(self.output_dir))]

    def make(self, step: int, state: str, model: Any, *, home: str | None = None) -> None:
        """Make the folder of a step, with the Trainer's state and the model's configuration.

        Args:
            step: step of the checkpoint.
            state: content of the Trainer's state.
            model: the model.
            home: home of the checkpoint, if it is another run's.
        """
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
        file = Path(self.path(step)) / TRAINER_STATE
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(state)

    def remove(self, step: int) -> None:
        """Remove the folder of a step, whatever it contains."""
        if self._writes:
            remove_folder(Path(self.path(step)))

    def remove_interrupted(self, after: int, complete: Collection[int]) -> None:
        """Remove folders of interrupted saves and deletions, which nothing may take for checkpoints.

        Args:
            after: step from which training resumes.
            complete: steps of the checkpoints in home.
        """
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
        content = read_json(Path(path) / HOME_FILE)
        home = content.get("home") if isinstance(content, dict) else None
        return home if isinstance(home, str) else None

    def is_here(self, path: str) -> bool:
        """Return True if a path is that of a folder `checkpoint-N` in the output directory."""
        same = Path(path).absolute().parent.resolve() == Path(self.output_dir).absolute().resolve()
        return same and step_of(path) is not None


def surplus(steps: Sequence[int], *, limit: int | None, best: int | None) -> list[int]:
    """Return the steps to delete, oldest first, so that `limit` of them are left.

    The newest one and the best one are always left, as by the Trainer's own rule.

    Args:
        steps: steps in the order in which they were saved.
        limit: the Trainer's `save_total_limit`; None or 0 for no limit.
        best: step of the best model.
    """
    if not limit or limit < 0 or len(steps) <= limit:
        return []
    protected = {steps[-1], best} & set(steps)
    num_left = max(limit, len(protected))
    return [step for step in steps if step not in protected][: len(steps) - num_left]


_log = get_logger("adapters")


@dataclass(frozen=True, slots=True)
class Choice:
    """Checkpoint to resume from.

    `home` is empty for a folder that the Trainer has written itself, else the URL of the checkpoint's home.
    """

    step: int
    folder: str
    home: str = ""


class Chooser:
    """Chooser among the checkpoints of a home, and the folders `checkpoint-N` of an output directory.

    Args:
        run: run of the Trainer.
        folders: folders of the output directory.
        with_training: a folder has to have the optimizer, the scheduler and the generators too.
    """

    def __init__(self, run: TrainerRun, folders: Folders, *, with_training: bool) -> None:
        self._checkpointer, self._home, self._group = run.checkpointer, run.home, run.ranks
        self._run, self._folders, self._with_training = run, folders, with_training

    def choose(self, asked: str | bool) -> Choice | None:
        """Return the checkpoint that `resume_from_checkpoint` asks for; None for "auto" without any.

        Ranks: collective.
        """
        if asked is True or asked in ("auto", self._home):
            choice = self._newest()
            if choice is None and asked != "auto":
                raise InvalidInput(
                    f"No valid checkpoint found in output directory ({self._folders.output_dir}), nor in "
                    f"{self._home}. Nothing was trained. Leave resume_from_checkpoint out, or use "
                    'resume_from_checkpoint="auto", which begins a new training where there is none.'
                )
            return choice
        return self._of_path(str(asked))

    def check_new(self) -> None:
        """Check that a new training may begin.

        Ranks: collective.
        """
        newest = self._group.of_rank_0(self._checkpointer.latest_step)
        if newest is not None:
            what = "train() was called without resume_from_checkpoint"
            self._run.refuse_new_run(newest, what, "trained", "Call train(resume_from_checkpoint=True)")

    def _newest(self) -> Choice | None:
        step = self._checkpointer.continue_from(verify=True)
        stock = self._group.of_rank_0(lambda: self._newest_stock(after=step or 0))
        if stock is not None:
            return Choice(stock, self._folders.path(stock))
        return None if step is None else Choice(step, self._folders.path(step), self._home)

    def _newest_stock(self, *, after: int) -> int | None:
        """Return the step of the newest complete folder that the Trainer has written itself."""
        for step, folder in reversed(list_folders(Path(self._folders.output_dir))):
            if step <= after:
                return None
            if not has_weights(folder):
                continue  # of an interrupted save, or of a checkpoint in a home
            fault = self._fault(folder)
            if fault is None:
                return step
            _log.warning("%s was skipped: %s", folder, fault)
        return None

    def _of_path(self, path: str) -> Choice | None:
        step = step_of(path)
        if step is None:
            raise InvalidInput(_invalid(path, "its name is not checkpoint-N, with N a step"))
        steps = self._group.of_rank_0(self._checkpointer.all_steps)
        home = self._group.of_rank_0(lambda: self._folders.home_of(path))
        if self._folders.is_here(path) and step in steps:
            self._checkpointer.continue_from(step, verify=True)
            return Choice(step, path, self._home)
        fault = self._group.of_rank_0(lambda: self._fault(Path(path)))
        if fault is None:
            self._go_back(step, steps, path)
            return Choice(step, path)
        if home is not None and home != self._home:
            self._group.of_rank_0(lambda: check_endpoint(home, f"The folder {path}", own=self._home))
            self._go_back(step, steps, path)
            return Choice(step, path, home)
        if (
            self._folders.is_here(path)
            and steps
            and step > max(steps)
            and self._group.of_rank_0(lambda: home_only(path))
        ):
            _log.warning(
                "%s is of a save that was interrupted before it was complete. Training resumes from the "
                "newest checkpoint that is.",
                path,
            )
            return self._newest()
        raise InvalidInput(_invalid(path, fault))

    def _go_back(self, step: int, steps: list[int], path: str) -> None:
        """Continue the home after its newest checkpoint up to a step that was saved elsewhere."""
        older = [one for one in steps if one <= step]
        if older:
            self._checkpointer.continue_from(max(older))
        elif steps:
            raise InvalidInput(
                f"{self._home} holds a run from step {min(steps)} on, which does not continue {path}. "
                "Nothing was trained. Give attach() another home for a training that begins there."
            )

    def _fault(self, folder: Path) -> str | None:
        if not folder.is_dir():
            return "the folder does not exist"
        return find_fault(folder, world_size=self._group.world_size, with_training=self._with_training)


def home_only(path: str) -> bool:
    """Return True if a folder does not have weights of its own."""
    return Path(path).is_dir() and not has_weights(Path(path))


def _invalid(path: str, reason: str) -> str:
    return (
        f"Can't find a valid checkpoint at {path}: {reason}. Nothing was trained. Call "
        "train(resume_from_checkpoint=True) to resume from the newest one that verifies."
    )


def write_folder(trainer: Trainer, home: str, step: int, folder: str) -> None:
    """Write the folder of a step, for `from_pretrained` and for a Trainer without Holdfast."""
    try:
        checkpoint = open_checkpoint(home, step)
    except NotFound:  # the step is only in a local folder
        _log.warning("%s was not written, because %s does not have step %d", folder, home, step)
        return
    everything = ExportSelection.choose(checkpoint, rank=0, only=None, rename=None, num_threads=4)
    write_training_files(everything, Path(folder), overwrite=True)
    trainer._save(folder, state_dict=map_weights(checkpoint, MODEL, Path(folder)))
