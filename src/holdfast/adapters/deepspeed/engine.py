"""An attached engine of DeepSpeed: its checks, its session, and the methods that save, load and step."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from holdfast.adapters.deepspeed.resharding import ReshardedFiles, returning_weights
from holdfast.adapters.deepspeed.saved_files import Facts, RunHome, SavedFiles, name_in, stock_tag, write_note
from holdfast.adapters.kit.run import HOME, PrivateMemory, check_attach, insert_class, private_memory
from holdfast.checkpoint.exchange.packed_value import Packed, pack
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import InvalidInput, NotFound, SaveWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.log import get_logger


def check_engine(engine: Any) -> None:
    """Check that an object is an engine that Holdfast can save."""
    if not isinstance(engine, DeepSpeedEngine):
        hint = ""
        if isinstance(engine, tuple):
            hint = " deepspeed.initialize() returns a tuple, whose first element is the engine."
        raise InvalidInput(
            f"attach() needs the engine of deepspeed.initialize(), not a {type(engine).__name__}.{hint} "
            "Nothing was changed."
        )
    if isinstance(engine, PipelineEngine):
        raise Unsupported(
            "Pipeline engines are not supported: they write their layers without the engine's checkpoint "
            "names. The engine was not changed. Leave attach() out, and save as DeepSpeed does."
        )
    offload = engine.zero_offload_param()
    device = None if offload is None else str(getattr(offload.device, "value", offload.device))
    if engine.zero_nvme_offload_optimizer() or device == "nvme":
        raise Unsupported(
            "The engine keeps state in files of its own (offload to NVMe), which Holdfast does not save. "
            'The engine was not changed. Offload to "cpu", or leave attach() out.'
        )
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise InvalidInput(
            f"The configuration of DeepSpeed chooses {type(engine.checkpoint_engine).__name__} to write "
            'checkpoints. The engine was not changed. Remove "checkpoint": {"writer": ...} and '
            '"datastates_ckpt" from the configuration: Holdfast already writes in the background.'
        )


_WRAPPERS = frozenset({DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3})
"""Classes that write to their partitions in `step()` of the optimizer that they have, and not elsewhere.

Subclasses are left out: those of ZenFlow and SuperOffload step in another thread or process.
"""
_PLAIN = frozenset({DeepSpeedCPUAdam, FusedAdam})


def memory_of_engine(engine: Any) -> list[PrivateMemory]:
    """Return the memory of an engine that may be copied beside the next steps; [] without any.

    These are partitions in full precision and the state of the optimizer. What belongs to the module is left
    out: scripts may write to it at any time, for example to exchange averaged weights.
    """
    optimizer: Any = engine.optimizer
    module = engine.module
    if type(optimizer) in _WRAPPERS:
        optimizer = None if getattr(optimizer, "zenflow", False) else optimizer.optimizer
    kind = type(optimizer)
    is_plain = kind in _PLAIN or kind.__module__.startswith("torch.optim.")
    # DeepSpeed itself updates the momentum of every optimizer with this name, during the backward pass.
    if not is_plain or "muon" in kind.__name__.lower():
        return []
    owned = [one for group in optimizer.param_groups for one in group["params"]]
    owned += optimizer.state  # under ZeRO 3 the groups are empty between two steps
    slots = (one for of_tensor in optimizer.state.values() for one in of_tensor.values())
    owned += [one for one in slots if isinstance(one, torch.Tensor)]
    shared = [*module.buffers(), *module.parameters()]
    partitions = (getattr(one, "ds_tensor", None) for one in module.parameters())  # under ZeRO 3
    return private_memory(owned, [*shared, *(one for one in partitions if one is not None)])


_log = get_logger("deepspeed")


class Session(CheckpointEngine):
    """Saves and loads of one engine, as its checkpoint engine.

    The one that it replaces still writes files without a tag.
    """

    def __init__(
        self,
        engine: Any,
        home: Home | None,
        client_state: Callable[[], Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(None)
        self.name = "HoldfastCheckpointEngine"
        self._engine, self._client_state, self._options = engine, client_state, options
        self._home = home  # None: each folder of checkpoints has its own
        self._stock, engine.checkpoint_engine = engine.checkpoint_engine, self
        self._current: RunHome | None = None  # home of the last save or load
        self._folder: str | None = None  # folder of the last save or load
        self._needs_client_state = False  # the last save or load has one
        self._request: dict[str, Any] | None = None  # arguments of the last save, while it may be dropped
        self._is_repeat = False  # the save under way replaces a dropped one
        self._is_saving = False
        self._tagged: str | None = None  # folder of the tag that is being saved
        self._files: dict[str, Packed] = {}  # that the save under way has collected
        # With the folder that it is read by.
        self._source: tuple[str, SavedFiles | ReshardedFiles] | None = None

    def wait(self) -> None:
        """Wait until everything saved so far is durable."""
        if self._current is not None:
            self._current.checkpointer.wait()

    def wait_copied(self) -> None:
        """Wait until the last save is copied, so that any memory may be written to."""
        if self._current is not None:
            self._current.wait_copied()

    # -- saves -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def saving(self, request: dict[str, Any], *, has_client_state: bool) -> Iterator[None]:
        """Collect the files of a save until `commit`. After a preemption notice, end the process then.

        `request` are the arguments of the save.
        """
        if request["save_dir"]:
            self._replace_dropped()
            self._open(request["save_dir"])
            self._request, self._needs_client_state = request, has_client_state
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving, self._tagged, self._files = False, None, {}
        if self._current is not None and self._current.checkpointer.preempted is not None:
            self._current.checkpointer.stop(self._current.last)

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        if self._is_saving:
            self._tagged = os.path.join(info.save_dir, info.tag)  # noqa: PTH118 - as DeepSpeed makes its paths
        else:
            self._stock.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        """Collect the content of a file of the tag; write any other file at once, as DeepSpeed does."""
        name = None if self._tagged is None else name_in(self._tagged, path)
        if name is None:
            self._stock.save(state_dict, path)
        else:
            self._files[name] = pack(state_dict, name)
            self._files[name].check(name)

    def commit(self, info: Any) -> bool:
        """Save the files of this rank, and write a note into their folder."""
        if not self._is_saving:
            return self._stock.commit(info)
        assert self._current is not None
        steps = int(self._engine.global_steps)
        facts = Facts(info.tag, bool(info.save_latest), steps, self._needs_client_state)
        private = [] if self._is_repeat else memory_of_engine(self._engine)
        step = self._current.save(facts, self._files, private)
        if self._current.ranks.rank == 0:
            write_note(info.save_dir, info.tag, self._current.home, step)
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: only the elements of a tensor are saved, not all of its storage."""
        return False

    def _replace_dropped(self) -> None:
        """Save the present state with the same arguments if the last save was dropped."""
        request, self._request = self._request, None
        if request is None or self._current is None or not self._current.was_dropped():
            return
        lost = (
            f"The checkpoint {request['tag'] or 'of the last save'} was dropped: the optimizer was written "
            "to while it was copied, and not by engine.step()."
        )
        client_state = self._present_client_state()
        if client_state is None:
            warn(
                f"{lost} Its client state is that of an earlier step, so nothing was saved in its place. "
                "Call save_checkpoint() again, or attach(engine, client_state=lambda: ...). To write to that "
                "memory after a save, call engine.holdfast_session.wait_copied() first.",
                SaveWarning,
            )
            return
        self._is_repeat = True
        try:
            self._engine.save_checkpoint(client_state=client_state, **request)
        finally:
            self._is_repeat, self._request = False, None
        warn(f"{lost} The state after step {self._engine.global_steps} was saved in its place.", SaveWarning)

    def _present_client_state(self) -> dict[str, Any] | None:
        """Return the present client state; None if only the script has it."""
        if self._client_state is not None:
            return dict(self._client_state())
        return None if self._needs_client_state else {}

    # -- loads -----------------------------------------------------------------------------------------------
    def find(self, folder: str, tag: str | None, *, rng: bool) -> SavedFiles | ReshardedFiles | None:
        """Choose the checkpoint to load. Return None if DeepSpeed itself wrote it, or if none exists."""
        self.wait_copied()
        run = self._open(folder)
        if self._engine.load_universal_checkpoint():
            return None
        stock = run.ranks.of_rank_0(lambda: stock_tag(folder, tag))
        if stock is not None and stock not in run.tags():
            return None
        found = run.load(tag, rng=rng)
        if found is None and tag is not None and stock is None:
            raise NotFound(
                f"{run.home} does not have a checkpoint with the tag {tag!r}, and {folder} does not have "
                f"files of DeepSpeed's own for it. Nothing was loaded. The tags in the home are "
                f"{run.tags()}.",
                key=tag,
            )
        if found is None:
            return None
        self._needs_client_state = found.facts.has_client_state
        saved, live = found.checkpoint.world_size, run.ranks.world_size
        run.announce("resuming from %s: step %d of %s", found.facts.tag, found.checkpoint.step, run.home)
        if run.ranks.rank == 0 and saved != live:
            _log.warning("%d ranks saved it: the %d ranks here have new random numbers", saved, live)
        return found if saved == live else ReshardedFiles(found, self._engine)

    def continue_after_stock(self) -> None:
        """Continue the home after a checkpoint that DeepSpeed has written itself."""
        assert self._current is not None
        self._needs_client_state = True  # not known, and it must not be lost
        self._current.continue_after()

    @contextlib.contextmanager
    def returning(self, source: SavedFiles | ReshardedFiles) -> Iterator[str]:
        """Yield a folder with an empty file for each file of a checkpoint.

        DeepSpeed looks for the names there. The files are empty, since it loads them through this engine.
        """
        with temporary_folder("deepspeed") as folder:
            tagged = folder / source.facts.tag
            for name in source.owners:
                (tagged / name).parent.mkdir(parents=True, exist_ok=True)
                (tagged / name).touch()
            self._source = (str(tagged), source)
            try:
                yield str(folder)
            finally:
                self._source = None

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of the current checkpoint to the CPU, or one that DeepSpeed wrote."""
        if self._source is not None:
            folder, source = self._source
            name = name_in(folder, path)
            if name is not None:
                return source.load(name)
        return self._stock.load(path, map_location)

    # -- steps -----------------------------------------------------------------------------------------------
    def end_step(self) -> None:
        """Check for a preemption notice after an optimizer step, and save if one has arrived."""
        if self._current is None:
            return
        self._replace_dropped()
        checkpointer = self._current.checkpointer
        checkpointer.should_save(int(self._engine.global_steps))
        if checkpointer.preempted is None or self._folder is None:
            return
        client_state = self._present_client_state()
        if client_state is not None:
            self._engine.save_checkpoint(self._folder, client_state=client_state)

    def _open(self, folder: str) -> RunHome:
        self._folder = os.fspath(folder)
        home = parse_home(Path(folder).absolute() / HOME) if self._home is None else self._home
        self._current = RunHome.of(home, self._options)
        return self._current


class HoldfastEngine(DeepSpeedEngine):
    """Engine whose checkpoints are Holdfast's. `attach` puts it before the class of an engine."""

    holdfast_session: Session

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint in the background. The arguments are DeepSpeed's.

        Raises:
            InvalidInput: the home holds a run that was not loaded; or a value cannot be saved.
            Preempted: a preemption notice has arrived, and the save is durable: SystemExit with status 75.
            HoldfastError: this save failed, or an earlier one.

        Ranks: collective.
        Blocks: for a copy of the module's weights. The optimizer's memory is copied beside the next forward
            and backward pass, and its next step waits for the copy.
        """
        request = {
            "save_dir": save_dir,
            "tag": tag,
            "save_latest": save_latest,
            "exclude_frozen_parameters": exclude_frozen_parameters,
        }
        with self.holdfast_session.saving(request, has_client_state=bool(client_state)):
            return super().save_checkpoint(client_state=client_state, **request)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint. The arguments and results are DeepSpeed's.

        Without a tag it is the newest one that verifies, or the one that DeepSpeed itself has written last.
        With the optimizer, the random number generators are restored too.

        Raises:
            Corrupt: the checkpoint is damaged; without a tag, all are.
            Unsupported: it cannot be loaded in this way; or by this number of ranks, which is a
                ZeRORuntimeException of DeepSpeed too.
            HoldfastError: as `Checkpointer.load`.

        Ranks: collective.
        """
        parts = load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        session = self.holdfast_session
        needs_weights = self.zero_optimization_partition_weights() and not load_optimizer_states
        source = session.find(load_dir, tag, rng=load_optimizer_states and not load_module_only)
        if source is None:
            path, client_state = super().load_checkpoint(load_dir, tag, load_module_strict, *parts)
            session.continue_after_stock()
        else:
            weights = returning_weights(source.files) if needs_weights else contextlib.nullcontext()
            with weights, session.returning(source) as folder:
                found_tag = source.facts.tag
                path, client_state = super().load_checkpoint(folder, found_tag, load_module_strict, *parts)
            path = None if path is None else str(Path(load_dir) / Path(path).relative_to(folder))
        return path, client_state

    def step(self, lr_kwargs: Any = None) -> None:
        """Step the optimizer. After a preemption notice, save and end the process by `Preempted`."""
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps != before:
            self.holdfast_session.end_step()


_T = TypeVar("_T")
_DECIDED = {
    "state": "the engine's objects are the state",
    "every": "call engine.save_checkpoint() when a save is due",
    "group": "the ranks are those of the engine",
}


def attach(
    engine: _T,
    home: str | os.PathLike[str] | Home | None = None,
    *,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    **options: Any,
) -> _T:
    """Have an engine save and load through Holdfast. Returns the same engine.

    `save_checkpoint` and `load_checkpoint` keep their arguments. The object gets a class in which
    `HoldfastEngine` comes directly before its own.

    Args:
        engine: engine of `deepspeed.initialize`.
        home: folder or URL of the run's checkpoints; by default `holdfast` in the folder that is given to
            `save_checkpoint` and `load_checkpoint`.
        client_state: returns the client state of the save after a preemption notice. Without it that save
            waits for the next call of `save_checkpoint`, unless the last one did not have a client state.
        options: other options of `Checkpointer`, such as `keep`, `memory` or `preemption`. By default all
            checkpoints are kept, as by DeepSpeed.

    Raises:
        InvalidInput: the object is not an engine, is already attached, or an option does not fit.
        Unsupported: the engine keeps its state in a way that Holdfast does not save.

    Ranks: every rank calls it; not collective.
    """
    check_attach(engine, HoldfastEngine, options, _DECIDED, name="engine")
    if options.get("local") is not None:
        raise Unsupported(
            "attach() does not take local=: a rank loads files that another rank has saved, so all are read "
            "from home. The engine was not changed. Leave local= out."
        )
    if client_state is not None and not callable(client_state):
        raise InvalidInput(
            f"client_state= must be a function that returns the client state, got "
            f"{type(client_state).__name__}. The engine was not changed. Write client_state=lambda: ..."
        )
    check_engine(engine)
    parsed = None if home is None else parse_home(home)
    attached = insert_class(engine, HoldfastEngine, before=type(engine))
    attached.holdfast_session = Session(attached, parsed, client_state, options)
    return engine
