"""Session: the saves and loads of one attached engine, with its homes and preemption."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from holdfast.adapters.deepspeed.resharding import ReshardedFiles
from holdfast.adapters.deepspeed.saved_files import Facts, RunHome, SavedFiles, name_in
from holdfast.adapters.kit.run import HOME, PrivateMemory, private_memory
from holdfast.checkpoint.exchange.packed_value import Packed, pack
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.checkpoint.run.options import Home, parse_home
from holdfast.errors import Corrupt, Denied, NotFound, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.linux.files import open_regular
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.log import get_logger

NOTE = "HOLDFAST.txt"
_PATTERN = "*_states.pt"
_MAX_TAG_BYTES = 4096


def stock_tag(folder: str, tag: str | None) -> str | None:
    """Return the tag to load from DeepSpeed's own files; None if a folder does not have them."""
    wanted = _latest(folder) if tag is None else str(tag)
    if wanted is None or next((Path(folder) / wanted).glob(_PATTERN), None) is None:
        return None
    return wanted


def _latest(folder: str) -> str | None:
    path = Path(folder) / "latest"
    try:
        with open_regular(path) as file:
            tag = file.read(_MAX_TAG_BYTES + 1).decode().strip()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise Denied(f"{path} cannot be read: {error}. Nothing was loaded.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Corrupt(_not_a_tag(path, str(error))) from error
    if len(tag) > _MAX_TAG_BYTES or "\0" in tag:
        raise Corrupt(_not_a_tag(path, f"it has {len(tag)} characters, or a NUL"))
    return tag or None


def _not_a_tag(path: Path, why: str) -> str:
    return (
        f"{path} does not contain the tag of a checkpoint: {why}. Nothing was loaded. Write the tag into it, "
        "name the tag as you load, or remove that file if no checkpoint of DeepSpeed's own is there."
    )


def write_note(folder: str, tag: str, home: str, step: int) -> None:
    """Write a note into the folder of a tag: the place of the checkpoint, and the command for its files."""
    place = Path(folder) / tag
    place.mkdir(parents=True, exist_ok=True)
    text = (
        f"This checkpoint is step {step} of the run in {home}, saved by Holdfast.\n\n"
        "engine.load_checkpoint() of an engine that is attached to Holdfast resumes from it.\n"
        "For DeepSpeed's own files, as zero_to_fp32.py and ds_to_universal.py read them, run\n\n"
        f"    holdfast export {home} FOLDER --to deepspeed --step {step}\n"
    )
    with atomic_file(place / NOTE, overwrite=True) as partial:
        partial.write_text(text)


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


class Session:
    """Saves and loads of one engine."""

    def __init__(
        self,
        engine: Any,
        home: Home | None,
        client_state: Callable[[], Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._engine, self._client_state, self._options = engine, client_state, options
        self._home = home  # None: each folder of checkpoints has its own
        self.files = FileEngine(engine.checkpoint_engine)
        engine.checkpoint_engine = self.files
        self._current: RunHome | None = None  # home of the last save or load
        self._folder: str | None = None  # folder of the last save or load
        self._needs_client_state = False  # the last save or load has one
        self._request: dict[str, Any] | None = None  # arguments of the last save, while it may be dropped
        self._is_repeat = False  # the save under way replaces a dropped one

    @property
    def waited_for_copy_s(self) -> float:
        """Total time that optimizers have waited for copies of this process."""
        return 0.0 if self._current is None else self._current.checkpointer.waited_for_copy_s

    def wait(self) -> None:
        """Wait until everything saved so far is durable."""
        if self._current is not None:
            self._current.checkpointer.wait()

    def wait_copied(self) -> None:
        """Wait until the last save is copied, so that any memory may be written to."""
        if self._current is not None:
            self._current.wait_copied()

    # -- saves -----------------------------------------------------------------------------------------------

    def begin_save(self, request: dict[str, Any], *, has_client_state: bool) -> None:
        """Open the home of the folder that is saved to. `request` are the arguments of the save."""
        self._replace_dropped()
        self._open(request["save_dir"])
        self._request, self._needs_client_state = request, has_client_state

    def commit(self, info: Any, files: dict[str, Packed]) -> None:
        """Save the files of this rank, and write a note into their folder."""
        assert self._current is not None
        steps = int(self._engine.global_steps)
        facts = Facts(info.tag, bool(info.save_latest), steps, self._needs_client_state)
        private = [] if self._is_repeat else memory_of_engine(self._engine)
        step = self._current.save(facts, files, private)
        if self._current.ranks.rank == 0:
            write_note(info.save_dir, info.tag, self._current.home, step)

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

    def end_save(self) -> None:
        """End the process after a save, if a preemption notice has arrived, once everything is durable."""
        if self._current is not None and self._current.checkpointer.preempted is not None:
            self._current.checkpointer.stop(self._current.last)

    def _open(self, folder: str) -> RunHome:
        self._folder = os.fspath(folder)
        home = parse_home(Path(folder).absolute() / HOME) if self._home is None else self._home
        self._current = RunHome.of(home, self._options)
        return self._current


class FileEngine(CheckpointEngine):
    """Checkpoint engine in place of DeepSpeed's, which still writes files without a tag."""

    def __init__(self, stock: Any) -> None:
        super().__init__(None)
        self.name = "HoldfastCheckpointEngine"
        self.stock = stock
        self._on_commit: Callable[[Any, dict[str, Packed]], None] | None = None
        self._folder: str | None = None  # of the tag that is being saved
        self._files: dict[str, Packed] = {}
        self._source: tuple[str, SavedFiles | ReshardedFiles] | None = None

    @contextlib.contextmanager
    def collecting(self, on_commit: Callable[[Any, dict[str, Packed]], None]) -> Iterator[None]:
        """Collect the files of a save, and pass them on when DeepSpeed completes it."""
        self._on_commit = on_commit
        try:
            yield
        finally:
            self._on_commit, self._folder, self._files = None, None, {}

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

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        if self._on_commit is None:
            self.stock.create(info)
        else:
            self._folder = os.path.join(info.save_dir, info.tag)  # noqa: PTH118 - as DeepSpeed makes its paths

    def save(self, state_dict: Any, path: str) -> None:
        """Collect the content of a file; write what does not belong to a tag."""
        name = None if self._folder is None else name_in(self._folder, path)
        if name is None:
            self.stock.save(state_dict, path)
        else:
            self._files[name] = pack(state_dict, name)
            self._files[name].check(name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of the current checkpoint to the CPU, or one that DeepSpeed wrote."""
        if self._source is not None:
            folder, source = self._source
            name = name_in(folder, path)
            if name is not None:
                return source.load(name)
        return self.stock.load(path, map_location)

    def commit(self, info: Any) -> bool:
        """Complete a checkpoint."""
        if self._on_commit is None:
            return self.stock.commit(info)
        self._on_commit(info, self._files)
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: only the elements of a tensor are saved, not all of its storage."""
        return False
