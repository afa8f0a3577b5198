"""Session: the saves and loads of one attached Accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.adapters.accelerate.folders import (
    Folders,
    automatic_number,
    find_fault,
    is_stock,
    number_of,
    read_marker,
)
from holdfast.adapters.accelerate.state import (
    FOLDERS,
    GENERATORS,
    PROGRESS,
    live_objects,
    loaded_models,
    saved_models,
)
from holdfast.adapters.kit.run import Choice, Notices, TrainerRun, open_runs, split_notices
from holdfast.checkpoint.run.options import Home
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidInput,
    LoaderWarning,
    ResumeWarning,
    StrayParametersWarning,
)
from holdfast.system.callsite import warn
from holdfast.system.log import get_logger

if TYPE_CHECKING:
    from holdfast.adapters.accelerate.accelerator import HoldfastAccelerator

_log = get_logger("adapters")


class Session(TrainerRun):
    """Saves and loads of one Accelerator. All methods but `forget` are collective."""

    def __init__(
        self, accelerator: HoldfastAccelerator, home: Home, root: Path, options: Mapping[str, Any]
    ) -> None:
        self._accelerator = accelerator
        self._state: dict[str, Any] = {FOLDERS: {}, PROGRESS: {}}
        preemption, watches = split_notices(options.get("watches", ()))
        super().__init__(home, self._state, options, group=None, watches=watches)
        self._notices = self.notices = Notices(preemption.sources, self.ranks, signals=preemption.signals)
        self.is_open = True  # until it is closed, also by a new session of this process for the same home
        for other in open_runs():  # a process trains one run in a home, and this is its training now
            if isinstance(other, Session) and other is not self and other.home == self.home and other.is_open:
                other.close()
        # The ranks that write Accelerate's own files create folders.
        is_on_each_node = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if is_on_each_node else accelerator.is_main_process
        self._folders = Folders(root, self.home, writes=writes)
        self._names: dict[int, str] = {}  # of the folders of all checkpoints, by step
        self._complete: set[int] = set()  # steps that were complete when they were listed, or are since
        self._copies_at_once = False
        self._save_s = 0.0  # time of the last durable save
        self._chosen: Choice | None = None
        self.checkpointer.restore(only=[FOLDERS])  # waits for keepers, which may complete a checkpoint
        self._complete = set(self.ranks.of_rank_0(self.checkpointer.all_steps))
        self._has_begun = not self._complete
        names: dict[str, str] = self._state[FOLDERS]
        self._names = {int(step): name for step, name in names.items() if int(step) in self._complete}
        every = range(self.ranks.world_size)
        self.ranks.first_of(every, lambda: self._folders.tidy(self._names, self._complete))

    # -- saving ----------------------------------------------------------------------------------------------

    def is_preempted(self) -> bool:
        """Return True if a rank has a preemption notice."""
        self._settle()
        self._notices.end_step(self._save_s)
        self._notices.exchange()
        return self._notices.agreed is not None

    def save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        """Save the state under a folder's name, and return the folder. See `Accelerator.save_state`."""
        accelerator, config = self._accelerator, self._accelerator.project_configuration
        self._settle()
        while self.doomed and self.pending:  # saves may be faster than the disk
            with suppress(HoldfastError):  # a later one may succeed
                self.pending[0].wait_durable()
            self._settle()
        self._notices.end_step(self._save_s)
        name = self._name_of(output_dir)
        reason, step, gone = self._agree_on_save(name)
        folder = self._folders.path(name)
        models = saved_models(accelerator, str(folder))
        replaced = [one for one, known in self._names.items() if known == name]
        # Their folders are removed later.
        limit = config.total_limit if config.automatic_checkpoint_naming else None
        surplus = [] if limit is None else sorted(self._names)[: max(0, len(self._names) + 1 - limit)]
        self.doomed |= {one: self._names[one] for one in surplus}
        for one in {*gone, *replaced, *surplus}:
            self._names.pop(one, None)
        self._names[step] = name
        self._checkpoint(step, models)
        for one in sorted({*gone, *replaced, *surplus}):
            self.checkpointer.delete(one)
        config.iteration += 1
        self._settle()
        if reason is not None:
            self._notices.agreed = reason
            self.checkpointer.stop(step)
        return folder

    def _name_of(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Return the name of the folder that a call of `save_state` means."""
        config = self._accelerator.project_configuration
        if config.automatic_checkpoint_naming:
            return self._folders.name(self._folders.root / f"checkpoint_{config.iteration}")
        if output_dir is None:
            raise InvalidInput(
                "save_state() without a folder needs automatic_checkpoint_naming=True in "
                "ProjectConfiguration. Nothing was saved."
            )
        return self._folders.name(output_dir)

    def _agree_on_save(self, name: str) -> tuple[str | None, int, list[int]]:
        """Make the folder of a save. Return the reason of a notice, the step, and steps without a folder."""
        reasons = self.ranks.gather(self._notices.reason)
        step, *gone = self.ranks.of_rank_0(lambda: self._begin_save(name))
        if self.ranks.rank != 0:
            self._folders.make(name, step, complete=self._complete)  # on each node, if Accelerate does
        return next(filter(None, reasons), None), step, gone

    def _begin_save(self, name: str) -> list[int]:
        """Create the folder. Return the step, followed by the steps whose folders the script has removed."""
        if not self._has_begun:
            newest = max(self._complete)
            what = f"save_state() was called without load_state() of {self._names.get(newest, 'it')}"
            self.refuse_new_run(newest, what, "saved", "Call load_state()")
        config, folder = self._accelerator.project_configuration, self._folders.path(name)
        if config.automatic_checkpoint_naming and folder.exists():
            raise InvalidInput(
                f"Checkpoint directory {folder} ({config.iteration}) already exists. Nothing was saved. Call "
                "load_state() first, or set iteration in ProjectConfiguration to the number to start with."
            )
        # The folder's number, if it is greater than all before.
        newest = max([*self._complete, *(save.step for save in self.pending)], default=-1)
        step = max(newest + 1, number_of(Path(name).name) or 0)
        gone = [one for one, known in self._names.items() if not self._folders.path(known).is_dir()]
        self._folders.make(name, step, complete=self._complete)
        return [step, *gone]

    def _checkpoint(self, step: int, models: list[int]) -> None:
        accelerator = self._accelerator
        self._warn_of_gradients()
        self._state.clear()
        self._state.update(live_objects(accelerator, models))
        self._state[FOLDERS] = {str(one): name for one, name in self._names.items()}
        iteration = accelerator.project_configuration.iteration
        self._state[PROGRESS] = {"step": accelerator.step, "iteration": iteration + 1}
        silenced: list[type[Warning]] = [LoaderWarning]  # the positions of prepared loaders are saved
        if len(models) < len(accelerator._models):  # hooks may have saved the others
            silenced.append(StrayParametersWarning)
        save = self.save_step(step, silenced=silenced)
        if self._copies_at_once:
            save.wait_staged()

    def _warn_of_gradients(self) -> None:
        own: Any = self._accelerator
        if own.sync_gradients or own.gradient_accumulation_steps == 1:
            return
        if any(one.grad is not None for model in own._models for one in model.parameters()):
            warn(
                "The state is saved in the middle of accumulated gradients, which are not part of it. A run "
                "that resumes from it lacks them. Save when accelerator.sync_gradients is True.",
                ResumeWarning,
            )

    def _settle(self) -> None:
        """Record which saves are durable or have failed, and remove folders that are not needed."""
        for save in self.settle():
            if save.durable:
                self._complete.add(save.step)
                self._save_s = save.durable_s or 0.0
            elif self._names.get(save.step) is not None:
                self._copies_at_once = True  # something but the optimizer has written to the state
                self._folders.remove_interrupted(self._names.pop(save.step))
        for step, name in self.pop_doomed().items():
            self._folders.remove(name)
            self._complete.discard(step)

    # -- loading ---------------------------------------------------------------------------------------------

    def choose(self, asked: str | os.PathLike[str] | None) -> str | None:
        """Choose the checkpoint that `load_state` asks for, and return the folder if it is Accelerate's own.

        Such a folder was checked. A checkpoint in a home is loaded by `load`.
        """
        self.wait_settled()  # a failed save is no choice
        self._settle()
        self._complete = set(self.ranks.of_rank_0(lambda: sorted(self._complete)))
        existing = self.ranks.of_rank_0(
            lambda: [step for step, name in self._names.items() if self._folders.path(name).is_dir()]
        )
        self._names = {step: self._names[step] for step in existing}
        path = None if asked is None else os.path.expanduser(asked)  # noqa: PTH111 - it may be a URL
        if path is None or os.path.realpath(path) == os.path.realpath(self.home):
            chosen = self._newest()
        else:
            chosen = Choice(*self.ranks.of_rank_0(lambda: astuple(self._of_path(Path(path)))))
        self._chosen = chosen
        return chosen.folder if chosen.home is None else None

    def _newest(self) -> Choice:
        """Return the newest choice that verifies."""
        rows = self.ranks.of_rank_0(lambda: [list(astuple(one)) for one in self._newest_first()])
        for found in (Choice(*row) for row in rows):
            try:
                if found.home is None:
                    self.ranks.of_rank_0(lambda folder=found.folder: self._check_stock(Path(folder)))
                else:
                    self.checkpointer.continue_from(found.step, verify=True)
            except (Corrupt, InvalidInput) as error:
                _log.warning("%s was skipped: %s", found.folder, error)
                continue
            return found
        where = f"{self._folders.root} and {self.home}"
        if not rows:
            raise InvalidInput(f"There is no state to load in {where}. Nothing was loaded.")
        raise Corrupt(f"None of the states in {where} can be loaded; see above. Nothing was loaded.")

    def _newest_first(self) -> list[Choice]:
        """Return all choices of the run. Accelerate's own are among them if their names have an order."""
        steps = sorted(self._names, reverse=True)
        own = [Choice(str(self._folders.path(self._names[step])), step, self.home) for step in steps]
        if not self._accelerator.project_configuration.automatic_checkpoint_naming:
            return own
        stock = [
            Choice(str(path), number)
            for name in self._folders.list()
            if (number := automatic_number(name)) is not None
            and is_stock(path := self._folders.path(name))
            and read_marker(path) is None
        ]
        return sorted([*own, *stock], key=_number, reverse=True)

    def _of_path(self, path: Path) -> Choice:
        """Return the choice of a folder that `save_state` was called with."""
        if not path.is_dir():
            raise InvalidInput(f"Tried to find {path} but folder does not exist. Nothing was loaded.")
        marker = read_marker(path)
        if marker is None:
            self._check_stock(path)
            return Choice(str(path), 0)
        if not self._folders.is_ours(marker):
            check_endpoint(marker.home, f"The folder {path}", own=self.home)
            return Choice(str(path), marker.steps[-1], marker.home)
        steps = [step for step in marker.steps if step in self._complete]
        if not steps:
            newest = self._newest_first()
            advice = f"The newest that is: {newest[0].folder}." if newest else "There is no other."
            raise InvalidInput(
                f"{path} is of a save that was interrupted before it was complete in {self.home}. Nothing "
                f"was loaded. {advice} If attach() is given the home, it removes such folders at the start."
            )
        return Choice(str(path), steps[-1], self.home)

    def _check_stock(self, folder: Path) -> None:
        """Check a folder that Accelerate has written itself."""
        num_optimizers = len(self._accelerator._optimizers)
        fault = find_fault(folder, ranks=range(self.ranks.world_size), num_optimizers=num_optimizers)
        if fault is not None:
            raise InvalidInput(f"No state can be loaded from {folder}: {fault}. Nothing was loaded.")

    def load(self, *, strict: bool) -> None:
        """Load the chosen checkpoint."""
        chosen, self._chosen = self._chosen, None
        assert chosen is not None, "something was chosen"
        accelerator = self._accelerator
        models = loaded_models(accelerator, chosen.folder)
        self._state.clear()
        self._state.update(live_objects(accelerator, models))
        self._state.update({FOLDERS: {}, PROGRESS: {}})
        is_partial = len(models) < len(accelerator._models)
        only = [*self._state, GENERATORS] if is_partial else None
        if chosen.home in (None, self.home):
            self.checkpointer.restore(chosen.step, strict=strict, only=only)
        else:
            with self.reader_of(chosen.home, self._state) as elsewhere:
                elsewhere.restore(chosen.step, strict=strict, only=only)
            self._continue_home()
        accelerator.step = self._state[PROGRESS]["step"]
        self._set_iteration(self._state[PROGRESS]["iteration"])
        self._has_begun = True
        self.announce("loaded step %d of %s (%s)", chosen.step, chosen.home, chosen.folder)

    def continue_after(self, folder: str) -> None:
        """Continue the run after a folder that Accelerate has written itself was loaded."""
        self._chosen = None
        self._continue_home()
        self._set_iteration()
        self._has_begun = True
        self.announce("loaded %s, which Accelerate has written", folder)

    def _continue_home(self) -> None:
        if self._complete:
            self.checkpointer.continue_from()

    def _set_iteration(self, saved: int = 0) -> None:
        """Set the number of the next folder: `saved` of a checkpoint, but after all existing ones."""
        config = self._accelerator.project_configuration
        config.iteration = max(config.iteration, saved)
        if config.automatic_checkpoint_naming:
            numbers = [automatic_number(one) for one in self.ranks.of_rank_0(self._folders.list)]
            config.iteration = max([config.iteration, *(one + 1 for one in numbers if one is not None)])

    # -- the end ---------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Release the prepared objects, once the last save does not need them."""
        self.wait_copied()
        self._state.clear()

    def close(self) -> None:
        """Wait until all saves are durable, and end."""
        self.is_open = False
        self.checkpointer.close()
        self._settle()
        self._notices.close()
        self.notices = None
        self.ranks.barrier_and_close()


def _number(choice: Choice) -> int:
    number = automatic_number(Path(choice.folder).name)
    return -1 if number is None else number
