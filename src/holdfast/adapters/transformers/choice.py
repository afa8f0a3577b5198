"""Choice of the checkpoint to resume from, in homes and in the Trainer's own folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.adapters.kit.run import TrainerRun
from holdfast.adapters.transformers.folders import Folders
from holdfast.adapters.transformers.stock_folder import find_fault, has_weights, list_folders, step_of
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput
from holdfast.system.log import get_logger

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

        Raises:
            InvalidInput: there is none, or it is not complete.
            HoldfastError: as `Checkpointer.restore`.

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

        Raises:
            InvalidInput: the home holds checkpoints.

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
        """Continue the home after its newest checkpoint up to a step that was saved elsewhere.

        Raises:
            InvalidInput: all checkpoints of the home are newer.
        """
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
