"""An attached Accelerator: its checks, its session, and the methods that save and load through Holdfast."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from msgspec.structs import astuple
from typing_extensions import override

from holdfast.adapters.accelerate import folders, state
from holdfast.adapters.accelerate.folders import Folders
from holdfast.adapters.accelerate.state import (
    FOLDERS,
    GENERATORS,
    PROGRESS,
    DataPosition,
    UnpreparedGenerators,
)
from holdfast.adapters.kit import run
from holdfast.adapters.kit.run import Choice, Notices, TrainerRun
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import (
    Corrupt,
    HoldfastError,
    InvalidInput,
    LoaderWarning,
    ResumeWarning,
    StrayParametersWarning,
    Unsupported,
)
from holdfast.system.callsite import warn
from holdfast.system.log import get_logger

_KNOWN_ARGUMENTS = frozenset({"map_location", "strict"})
_MAP_LOCATIONS = (None, "cpu", "on_device")


def check_accelerator(accelerator: Accelerator) -> None:
    """Check the kind of training that an Accelerator is configured for."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        name = "DeepSpeed" if kind == DistributedType.DEEPSPEED else "Megatron-LM"
        raise Unsupported(
            f"The Accelerator uses {name}, whose engine saves by itself, so it was not changed. Use FSDP2 in "
            f"place of {name} (FullyShardedDataParallelPlugin(fsdp_version=2)), or leave attach() out."
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise Unsupported(
            "The Accelerator uses FSDP 1, so it was not changed. Set fsdp_version: 2 in its configuration, "
            "or FullyShardedDataParallelPlugin(fsdp_version=2) in the script."
        )
    if kind == DistributedType.XLA:
        raise Unsupported(
            "Training on TPUs is not supported. The Accelerator was not changed. Leave attach() out."
        )
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and config.project_dir is None:
        raise InvalidInput(
            "automatic_checkpoint_naming=True needs a folder for the checkpoints. The Accelerator was not "
            "changed. Set project_dir in ProjectConfiguration or in Accelerator."
        )


def check_load_arguments(arguments: dict[str, Any]) -> bool:
    """Check the further arguments of `load_state`, and return `strict`.

    Tensors are filled where they are, so `map_location` has no effect.
    """
    if arguments.get("map_location") not in _MAP_LOCATIONS:
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or "
            f"`'on_device'`; got {arguments['map_location']!r}. Nothing was loaded."
        )
    unknown = sorted(set(arguments) - _KNOWN_ARGUMENTS)
    if unknown:
        raise InvalidInput(
            f"load_state() got {', '.join(unknown)}, which Holdfast does not support. Nothing was loaded. "
            "Leave it out; strict and map_location are supported."
        )
    return bool(arguments.get("strict", True))


_log = get_logger("adapters")


class Session(TrainerRun):
    """Saves and loads of one Accelerator. All methods but `forget` are collective."""

    def __init__(
        self, accelerator: HoldfastAccelerator, home: Home, root: Path, options: Mapping[str, Any]
    ) -> None:
        self._accelerator = accelerator
        self._state: dict[str, Any] = {FOLDERS: {}, PROGRESS: {}}
        preemption, watches = run.split_notices(options.get("watches", ()))
        super().__init__(home, self._state, options, group=None, watches=watches)
        self._notices = self.notices = Notices(preemption.sources, self.ranks, signals=preemption.signals)
        self.is_open = True  # until it is closed, also by a new session of this process for the same home
        for other in list(run.open_runs):  # a process trains one run in a home, and this is its training now
            if isinstance(other, Session) and other is not self and other.home == self.home and other.is_open:
                other.close()
        # The ranks that write Accelerate's own files create folders.
        is_on_each_node = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if is_on_each_node else accelerator.is_main_process
        self._folders = Folders(root, self.home, writes=writes)
        self._copies_at_once = False
        self._save_s = 0.0  # time of the last durable save
        self.checkpointer.restore(only=[FOLDERS])  # waits for keepers, which may complete a checkpoint
        # The complete steps: listed here, and added as saves complete.
        self._complete = set(self.ranks.of_rank_0(self.checkpointer.all_steps))
        self._has_begun = not self._complete
        names: dict[str, str] = self._state[FOLDERS]
        # The names of the folders of all checkpoints, by step.
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
        reasons = self.ranks.gather(self._notices.reason)
        step, *gone = self.ranks.of_rank_0(lambda: self._begin_save(name))
        if self.ranks.rank != 0:
            self._folders.make(name, step, complete=self._complete)  # on each node, if Accelerate does
        folder = self._folders.path(name)
        models = state.saved_models(accelerator, str(folder))
        replaced = [saved for saved, known in self._names.items() if known == name]
        # Their folders are removed later.
        limit = config.total_limit if config.automatic_checkpoint_naming else None
        surplus = [] if limit is None else sorted(self._names)[: max(0, len(self._names) + 1 - limit)]
        self.doomed |= {old: self._names[old] for old in surplus}
        unwanted = {*gone, *replaced, *surplus}
        self._names = {saved: known for saved, known in self._names.items() if saved not in unwanted}
        self._names[step] = name
        self._checkpoint(step, models)
        for old in sorted(unwanted):
            self.checkpointer.delete(old)
        config.iteration += 1
        self._settle()
        if (reason := next(filter(None, reasons), None)) is not None:
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
        step = max(newest + 1, folders.number_of(Path(name).name) or 0)
        gone = [one for one, known in self._names.items() if not self._folders.path(known).is_dir()]
        self._folders.make(name, step, complete=self._complete)
        return [step, *gone]

    def _checkpoint(self, step: int, models: list[int]) -> None:
        accelerator = self._accelerator
        self._warn_of_gradients()
        self._state.clear()
        self._state.update(state.live_objects(accelerator, models))
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
    def choose(self, asked: str | os.PathLike[str] | None) -> Choice:
        """Choose the checkpoint that `load_state` asks for. A folder of Accelerate's own was checked."""
        self.wait_settled()  # a failed save is no choice
        self._settle()
        self._complete = set(self.ranks.of_rank_0(lambda: sorted(self._complete)))
        existing = self.ranks.of_rank_0(
            lambda: [step for step, name in self._names.items() if self._folders.path(name).is_dir()]
        )
        self._names = {step: self._names[step] for step in existing}
        path = None if asked is None else os.path.expanduser(asked)  # noqa: PTH111 - it may be a URL
        if path is None or os.path.realpath(path) == os.path.realpath(self.home):
            return self._newest()
        return Choice(*self.ranks.of_rank_0(lambda: astuple(self._of_path(Path(path)))))

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
            if (number := folders.automatic_number(name)) is not None
            and folders.is_stock(path := self._folders.path(name))
            and folders.read_marker(path) is None
        ]
        return sorted([*own, *stock], key=_number, reverse=True)

    def _of_path(self, path: Path) -> Choice:
        """Return the choice of a folder that `save_state` was called with."""
        if not path.is_dir():
            raise InvalidInput(f"Tried to find {path} but folder does not exist. Nothing was loaded.")
        marker = folders.read_marker(path)
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
        fault = folders.find_fault(folder, ranks=range(self.ranks.world_size), num_optimizers=num_optimizers)
        if fault is not None:
            raise InvalidInput(f"No state can be loaded from {folder}: {fault}. Nothing was loaded.")

    def load(self, chosen: Choice, home: str, *, strict: bool) -> None:
        """Load a checkpoint of a home."""
        accelerator = self._accelerator
        models = state.loaded_models(accelerator, chosen.folder)
        self._state.clear()
        self._state.update(state.live_objects(accelerator, models))
        self._state.update({FOLDERS: {}, PROGRESS: {}})
        is_partial = len(models) < len(accelerator._models)
        only = [*self._state, GENERATORS] if is_partial else None
        if home == self.home:
            self.checkpointer.restore(chosen.step, strict=strict, only=only)
        else:
            with self.reader_of(home, self._state) as elsewhere:
                elsewhere.restore(chosen.step, strict=strict, only=only)
            self._continue_home()
        accelerator.step = self._state[PROGRESS]["step"]
        self._set_iteration(self._state[PROGRESS]["iteration"])
        self._has_begun = True
        self.announce("loaded step %d of %s (%s)", chosen.step, home, chosen.folder)

    def continue_after(self, folder: str) -> None:
        """Continue the run from a folder that Accelerate itself has written and just loaded."""
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
            numbers = [folders.automatic_number(one) for one in self.ranks.of_rank_0(self._folders.list)]
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
    number = folders.automatic_number(Path(choice.folder).name)
    return -1 if number is None else number


class HoldfastAccelerator(Accelerator):
    """Accelerator that saves and loads with Holdfast. `attach` inserts it before the class `Accelerator`."""

    holdfast_home: Home | None  # None until the first folder is named, beside which it is
    holdfast_root: Path | None  # folder of the folders that are named, if it is known
    holdfast_options: Mapping[str, Any]  # of the Checkpointer
    holdfast_session: Session | None = None  # None while the home is not known, and after `end_training`

    def open_session(self, folder: str | os.PathLike[str] | None = None) -> Session:
        """Return the session, which the first call opens. An unknown home is then beside `folder`.

        Ranks: collective.
        """
        if self.holdfast_session is None or not self.holdfast_session.is_open:
            if self.holdfast_home is None or self.holdfast_root is None:
                if folder is None:
                    raise InvalidInput(
                        "Neither a folder is named nor automatic_checkpoint_naming is set. Nothing was done. "
                        "Pass a folder, or set project_dir and automatic_checkpoint_naming in "
                        "ProjectConfiguration."
                    )
                self.holdfast_root = Path(folder).absolute().parent
                self.holdfast_home = parse_home(self.holdfast_root / run.HOME)
            self.holdfast_session = Session(
                self, self.holdfast_home, self.holdfast_root, self.holdfast_options
            )
        return self.holdfast_session

    @override
    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save the state like `Accelerator.save_state`, and return the folder that names the checkpoint.

        Args:
            output_dir: the folder; needed without `automatic_checkpoint_naming`.
            safe_serialization: has no effect, since tensors are always stored as safetensors.
            save_model_func_kwargs: have no effect, as without DeepSpeed.

        Raises:
            InvalidInput: the folder exists already; or the home holds a run that was not loaded.
            Preempted: after a preemption notice, once the save is durable: SystemExit with status 75.
            HoldfastError: as `Checkpointer.save`.

        Ranks: collective.
        Blocks: until what no optimizer owns is copied, and for a small exchange of the ranks.
        """
        return self.open_session(output_dir).save(output_dir)

    @override
    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a state like `Accelerator.load_state`.

        Args:
            input_dir: folder that `save_state` has named, with or without Holdfast; by default the newest
                one that verifies.
            load_kwargs: arguments for reading pickles in folders that Accelerate has written itself.
            load_model_func_kwargs: `strict`; for folders of Accelerate's own, all that it takes.

        Raises:
            InvalidInput: there is nothing to load, or the state differs from the one that was saved.
            HoldfastError: as `Checkpointer.restore`.

        Ranks: collective.
        """
        session = self.open_session(input_dir)
        chosen = session.choose(input_dir)
        if chosen.home is not None:
            session.load(chosen, chosen.home, strict=check_load_arguments(load_model_func_kwargs))
        else:
            super().load_state(chosen.folder, load_kwargs, **load_model_func_kwargs)
            session.continue_after(chosen.folder)

    @override
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a data loader, whose position is then part of the state.

        Loaders with GlobalBatches keep them, since these divide the data among the ranks themselves.
        """
        if state.batches_of(data_loader) is None or getattr(data_loader, "_is_accelerate_prepared", False):
            before = UnpreparedGenerators(data_loader)
            return state.add_position(super().prepare_data_loader(data_loader, *args, **kwargs), before)
        on_device = args[0] if args else kwargs.get("device_placement")
        return state.add_position(state.prepare_batches(self, data_loader, on_device=on_device))

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches. After a load, it continues the checkpoint's pass.

        A loader with GlobalBatches is at its position already, and is returned itself.
        """
        position = getattr(dataloader, "holdfast_position", None)
        if isinstance(position, DataPosition) and position.batches is not None:
            return dataloader if position.check_skip(num_batches) else ()
        return state.follow_position(
            super().skip_first_batches(dataloader, num_batches), dataloader, continues=num_batches > 0
        )

    @override
    def free_memory(self, *objects: torch.nn.Module) -> Any:
        """Release all references to prepared objects, once the last save does not need them."""
        if self.holdfast_session is not None:
            self.holdfast_session.forget()
        return super().free_memory(*objects)

    @override
    def end_training(self) -> None:
        """Wait until all saves are durable, then end the training.

        Ranks: collective.
        """
        session, self.holdfast_session = self.holdfast_session, None
        if session is not None and session.is_open:
            session.close()
        super().end_training()


_T = TypeVar("_T", bound=Accelerator)
_DECIDED = {
    "state": "what the Accelerator has prepared and registered is the state",
    "every": "call save_state when the script wants to save",
    "keep": "set total_limit in ProjectConfiguration, or delete folders",
    "group": "the ranks are those of the Accelerator",
}


def attach(accelerator: _T, home: str | os.PathLike[str] | Home | None = None, **options: Any) -> _T:
    """Have an Accelerator save and load its state through Holdfast. Returns the same Accelerator.

    Everything that `save_state` and `load_state` take keeps its meaning: folders, hooks, registered objects,
    `automatic_checkpoint_naming` and `total_limit`. `save_state` returns when the state is copied, or about
    to be copied beside training. The folder that it names holds the name of a checkpoint in the home.

    If the home holds a run, the folders of its checkpoints are made to agree with it: those of interrupted
    saves are removed, and missing ones are made again.

    Args:
        accelerator: an `Accelerator`, before or after `prepare`.
        home: folder or URL of the run's checkpoints; by default `holdfast` beside their folders.
        options: other options of `Checkpointer`, such as `local`, `memory`, `preemption` or `limits`.

    Raises:
        InvalidInput: the Accelerator is already attached, or an option is decided by its configuration.
        Unsupported: the Accelerator saves in a way that Holdfast does not replace, such as with DeepSpeed.
        HoldfastError: the home cannot be read.

    Ranks: collective.
    """
    run.check_attach(accelerator, HoldfastAccelerator, options, _DECIDED, name="Accelerator")
    check_accelerator(accelerator)
    for loader in accelerator._dataloaders:
        state.check_prepared(loader)
    config = accelerator.project_configuration
    root = None if config.project_dir is None else Path(config.project_dir)
    if root is not None and config.automatic_checkpoint_naming:
        root /= "checkpoints"
    parsed = parse_home(home) if home is not None else None if root is None else parse_home(root / run.HOME)
    if parsed is not None and root is None:
        root = Path.cwd() if "://" in str(parsed.url) else Path(parsed.url).absolute().parent
    attached = run.insert_class(accelerator, HoldfastAccelerator, before=Accelerator)
    attached.holdfast_home, attached.holdfast_root, attached.holdfast_options = parsed, root, options
    for loader in accelerator._dataloaders:
        state.add_position(loader)
    if parsed is not None:
        attached.open_session()
    return accelerator


def is_preempted(accelerator: Accelerator) -> bool:
    """Return True after a preemption notice, on all ranks at the same call.

    The next `save_state` saves, waits until that is durable, and ends the process with status 75. A script
    that saves rarely calls it after each step: `if is_preempted(accelerator): accelerator.save_state(...)`.

    Raises:
        InvalidInput: the Accelerator is not attached.

    Ranks: collective; every rank calls it equally often.
    Blocks: hardly; with several ranks the result is that of the call before.
    """
    if not isinstance(accelerator, HoldfastAccelerator):
        raise InvalidInput("This Accelerator is not attached. Call attach(accelerator) first.")
    return accelerator.holdfast_session is not None and accelerator.holdfast_session.is_preempted()
