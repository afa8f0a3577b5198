"""Checkpoint manager for torchtitan, which saves in the background. One line of the config chooses it."""

# torchtitan has no type information where it is not installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

import holdfast
from holdfast import Checkpointer
from holdfast.adapters.kit.run import check_versions, open_loaded
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.run.options import Limits
from holdfast.errors import Corrupt, InvalidInput, NotFound

check_versions("torchtitan", {"torchtitan": (0, 3)})  # the first whose config chooses a checkpoint manager

from torchtitan.components.checkpointer import (  # noqa: E402 - the check is first
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    CheckpointManager,
)
from torchtitan.tools import filesystem  # noqa: E402

__all__ = ["HoldfastCheckpointManager"]

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")  # without the zeros of a folder of Holdfast
_METADATA = ".metadata"
_HF_INDEX = "model.safetensors.index.json"
_DAMAGE = (EOFError, LookupError, AttributeError, ImportError, ValueError, pickle.UnpicklingError)
"""Errors of a reader whose metadata is damaged."""


def _steps_with(folder: str, name: str) -> list[int]:
    """Return the steps of the folders with a file of this name, newest first."""
    entries = filesystem.listdir(folder) if filesystem.isdir(folder) else []
    matches = (_STEP.fullmatch(entry.rstrip("/")) for entry in entries)
    steps = sorted((int(match[1]) for match in matches if match), reverse=True)
    return [step for step in steps if filesystem.isfile(filesystem.join(_folder_of(folder, step), name))]


def _folder_of(folder: str, step: int) -> str:
    return filesystem.join(folder, f"step-{step}")


def _is_resumable(folder: str, step: int, names: Collection[str]) -> bool:
    """Return True if a DCP checkpoint contains more than a model, or may do so."""
    path = _folder_of(folder, step)
    if step == 0 or filesystem.is_remote(path):  # a seed; or one whose content only the load itself reads
        return True
    try:
        keys = _read_keys(path)
    except _DAMAGE:  # the load itself names the damage, if nothing newer takes its place
        return True
    return any(key == name or key.startswith(f"{name}.") for key in keys for name in names)


def _check_metadata(folder: str, step: int) -> None:
    """Check that the metadata of a DCP checkpoint can be read."""
    path = _folder_of(folder, step)
    if filesystem.is_remote(path):
        return
    try:
        _read_keys(path)
    except _DAMAGE as error:
        raise Corrupt(
            f"{path}/.metadata, which torchtitan's own manager wrote, is damaged: {error}. Nothing was "
            "loaded. Move that folder away to resume from an older checkpoint.",
            step=step,
            key=path,
        ) from error


def _read_keys(path: str) -> Collection[str]:
    return FileSystemReader(path).read_metadata().state_dict_metadata


_STEP_FOLDER = re.compile(r"(.*)/step-([0-9]+)/*", re.DOTALL)
_RUN = "holdfast.json"


class HoldfastCheckpointManager(CheckpointManager):
    """Checkpoint manager that saves in the background, and restores the newest checkpoint that verifies.

    A script chooses it in its config: `checkpoint=HoldfastCheckpointManager.Config(enable=True)`. The folder
    of checkpoints is the home of the run. Checkpoints that torchtitan's own manager left in it are resumed
    from if they are newer.

    Ranks: all methods are collective.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Options of torchtitan's own manager, and two of the Checkpointer."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Save in the background; with "disabled", a save returns when it is durable."""

        local: str | None = None
        """Folder on each host's fast disk, for a checkpoint folder that is slow or far."""

        memory: str = "8GiB"
        """Limit of each rank's staging memory."""

    def __init__(self, config: Config, **components: Any) -> None:
        # The writes, the deletions and the process group of the own manager have no work here.
        super().__init__(replace(config, async_mode="disabled", keep_latest_k=0), **components)
        self._checkpointer: Checkpointer | None = None
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self._is_blocking = config.async_mode == "disabled"
        self._live = live_objects(self.states)
        self._ranks = Ranks(timeout_s=Limits().rank_timeout_s)
        self._checkpointer = Checkpointer(
            self.folder,
            self._live,
            every=self.interval,
            keep=self.keep_latest_k or None,
            local=config.local,
            memory=config.memory,
            group=self._ranks,
        )

    def __del__(self) -> None:
        """Do nothing. `close` is collective, so the garbage collector must not call it at any time."""

    # -- saving ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only:
            return False
        if curr_step == 0:  # a seed for any number of ranks: torchtitan's own, without data and generators
            return super()._save(curr_step, last_step)
        checkpointer = self._own()
        for value in self._live.values():
            if isinstance(value, Counters):
                value.end_step()
        checkpointer.should_save(curr_step)  # only for a notice: the trainer has its own rhythm
        is_due = self._should_save(curr_step, last_step)
        if last_step:
            # The step itself is saved whole, so that a restart finds the training complete. It is saved last,
            # so that a kill meanwhile repeats the export, and also if the export fails.
            try:
                if self.last_save_model_only:
                    self._save_last_step(curr_step)
            finally:
                checkpointer.finish(curr_step)
        elif is_due or checkpointer.preempted:
            checkpointer.save(curr_step)
            if self._is_blocking:
                checkpointer.wait()
        if checkpointer.preempted and not last_step:
            checkpointer.stop(curr_step)
        return is_due

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the optimizers' next step waits for the copy."""

    def maybe_wait_for_saving(self) -> None:
        """Wait until the newest save is durable."""
        if self.enable:
            self._own().wait()

    def _purge_stale_checkpoints(self) -> None:
        """Do nothing: the Checkpointer deletes what `keep_latest_k` does not keep."""

    # -- loading ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        stock, own, exported = self._ranks.of_rank_0(lambda: self._choices(step))
        if stock is not None and (own is None or stock > own):
            try:
                found = super()._load(stock)
            except CheckpointException:
                _check_metadata(self.folder, stock)
                raise
            self._continue_home(stock)
            return found
        for name in self.exclude_from_loading:
            if name not in self.states:
                raise ValueError(
                    f"exclude_from_loading names {name!r}, which the trainer does not have. It has "
                    f"{', '.join(sorted(self.states))}."
                )
        restored = self._restore(step, is_listed=own is not None)
        if restored is None and exported is not None:
            raise InvalidInput(
                f"{self.folder} has step-{exported}, which contains only a model, and no checkpoint to "
                "resume from. Nothing was loaded. To begin a new training with that model, set "
                f"initial_load_path={_folder_of(self.folder, exported)} and another folder."
            )
        if restored is None:
            return self._load_elsewhere(step)
        self._set_position(restored, attempt=self._own().restored_attempt)
        return True

    def _restore(self, step: int, *, is_listed: bool) -> int | None:
        """Restore a step, or the newest one for -1. Return None if the home does not have it.

        The Checkpointer finds more than a listing: also a save whose keeper was killed before the manifest.
        """
        excluded = keys_of(self.exclude_from_loading, self._live)
        only = [key for key in self._live if key not in excluded] if excluded else None
        if step == -1:
            return self._own().restore(only=only)
        try:
            return self._own().restore(step, only=only)
        except NotFound:
            if is_listed:
                raise
            return None

    def _load_elsewhere(self, step: int) -> bool:
        """Load the initial checkpoint that the options name, for a folder without checkpoints."""
        if step != -1:
            raise FileNotFoundError(
                f"--checkpoint.load_step={step} not found: {self.folder} has neither a checkpoint of "
                f"Holdfast nor one of torchtitan of this step. `holdfast ls {self.folder}` lists the former."
            )
        path = self.initial_load_path
        home = None if path is None or self.initial_load_in_hf else _home_of(path)
        if home is None:
            return super()._load(-1)
        wanted = keys_of([MODEL], self._live) if self.initial_load_model_only else list(self._live)
        opened = holdfast.open(*home)
        opened.load_into({key: self._live[key] for key in wanted}, strict=not self.initial_load_model_only)
        self._set_position(opened.step, home[0])
        return True

    def _choices(self, step: int) -> tuple[int | None, int | None, int | None]:
        """Return the steps in the folder: of torchtitan's own checkpoint, of Holdfast's, of a model."""
        own = self._own().all_steps() if step != -1 else [self._own().latest_step()]
        stock = _steps_with(self.folder, _METADATA)
        if step != -1:
            is_own = step in own
            return (step if step in stock and not is_own else None), (step if is_own else None), None
        names = [name for name in self.states if name != MODEL]
        newest = next((saved for saved in stock if _is_resumable(self.folder, saved, names)), None)
        exported = max([*stock, *_steps_with(self.folder, _HF_INDEX)], default=None)
        return newest, own[0], exported if newest is None and own[0] is None else None

    def _find_load_step(self, folder: str = "") -> int:
        """Return -1 for this run's folder, because `_load` searches it itself."""
        return super()._find_load_step(folder) if folder else -1

    def _continue_home(self, stock: int) -> None:
        """Continue the home after a checkpoint of torchtitan's own manager."""
        try:
            base = self._own().continue_from()
        except Corrupt as error:
            raise Corrupt(
                f"Step {stock} was loaded from torchtitan's checkpoint, but the home beside it cannot be "
                f"continued: {error}",
                step=stock,
            ) from error
        if base is not None and base > stock:
            raise InvalidInput(
                f"load_step={stock} is a checkpoint of torchtitan, and {self.folder} has newer ones of "
                f"Holdfast, up to step {base}, whose order would be lost. Choose a new folder, with "
                f"initial_load_path={_folder_of(self.folder, stock)} and initial_load_model_only=False."
            )

    def _set_position(self, step: int, home: str | None = None, *, attempt: int | None = None) -> None:
        if DATALOADER in self._live:
            self._live[DATALOADER].set(home or self.folder, step, attempt)

    # -- the end ---------------------------------------------------------------------------------------------
    def _close(self) -> None:
        if self._checkpointer is None:
            return
        checkpointer, self._checkpointer = self._checkpointer, None
        checkpointer.__exit__(*sys.exc_info())  # waits, unless an exception is being handled
        super()._close()

    def _own(self) -> Checkpointer:
        assert self._checkpointer is not None, "the manager is disabled or closed"
        return self._checkpointer


def _home_of(path: str) -> tuple[str, int | None] | None:
    """Return the home and the step that a path names; None for other paths."""
    if _has_run(path):
        return path, None
    match = _STEP_FOLDER.fullmatch(path)
    is_stock = filesystem.isfile(filesystem.join(path, _METADATA))
    return (match[1], int(match[2])) if match and _has_run(match[1]) and not is_stock else None


def _has_run(path: str) -> bool:
    return filesystem.isfile(filesystem.join(path, _RUN))


class Counters:
    """Counters of the trainer, such as its step, at the end of the last step.

    The trainer counts a step when it begins. A save at the end of a training whose data ran out comes after
    that, and must not have the number of a step that was not made.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._ended: dict[str, Any] | None = None

    def end_step(self) -> None:
        """Note the counters at the end of a step."""
        self._ended = dict(self._trainer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return self._trainer.state_dict() if self._ended is None else self._ended

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the counters."""
        self._trainer.load_state_dict(state_dict)


class DataPosition:
    """Position in the data. Each rank saves its own.

    Its keys name data-parallel ranks, so a rank whose number or layout has changed needs the position that
    another rank saved. A load waits for `set`, which finds it.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position."""
        return self._dataloader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved position until `set`."""
        self._saved = state_dict

    def set(self, home: str, step: int, attempt: int | None) -> None:
        """Set the position that was loaded, if any."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        loader = self._dataloader
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            # A new iterator draws the seed of its workers, and the restored generator is past the draw of the
            # uninterrupted training. torchtitan makes one iterator in each process.
            loader.generator = torch.Generator()
            loader.generator.set_state(torch.get_rng_state())
        if not saved.keys() >= self._dataloader.state_dict().keys():
            opened = open_loaded(home, step, attempt)
            ranks = (opened.values(rank).get(DATALOADER, {}) for rank in range(opened.world_size))
            saved = {key: value for found in ranks for key, value in found.items()}
        self._dataloader.load_state_dict(saved)


def live_objects(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a Checkpointer for the states of a torchtitan manager.

    Model parts and the optimizers of a container become entries of their own: `model`, or `model_0` and
    so on if there are several.
    """
    found = {
        **_numbered(MODEL, states[MODEL].model),
        **_numbered(OPTIMIZER, getattr(states[OPTIMIZER], "optimizers", [states[OPTIMIZER]])),
    }
    for name, value in states.items():
        if name in (MODEL, OPTIMIZER) or value is None:
            continue
        if name == DATALOADER:
            found[name] = DataPosition(value)
        elif name == LR_SCHEDULER or isinstance(value, torch.Tensor) or not hasattr(value, "state_dict"):
            found[name] = value
        else:
            found[name] = Counters(value)
    return found


def _numbered(name: str, values: Sequence[Any]) -> dict[str, Any]:
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}_{number}": value for number, value in enumerate(values)}


def keys_of(names: Collection[str], live: Collection[str]) -> list[str]:
    """Return the keys of live objects that belong to some of torchtitan's states."""
    numbered = re.compile(f"({MODEL}|{OPTIMIZER})_[0-9]+")
    return [key for key in live if key in names or ((of := numbered.fullmatch(key)) and of[1] in names)]
