"""Files of DeepSpeed as a state of a Checkpointer, and the way back; tags in a folder and in a home."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec import Struct
from torch.optim import Optimizer

import holdfast
from holdfast.adapters.kit.run import TrainerRun, open_loaded
from holdfast.checkpoint.exchange import packed_value
from holdfast.checkpoint.exchange.packed_value import Packed
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.run.options import Home
from holdfast.errors import Corrupt, Denied, HoldfastError, InvalidInput, NotFound, Unsupported
from holdfast.system.documents import read_as, to_plain
from holdfast.system.linux.files import open_regular
from holdfast.system.log import get_logger

META = "deepspeed"
"""Top-level key of the facts about a save."""
_VERSION = 1
_RESERVED = frozenset({META, "rng"})


class Facts(Struct, frozen=True):
    """Facts about one save of an engine."""

    tag: str  # DeepSpeed's name of the checkpoint
    is_latest: bool  # a load without a tag may take it
    global_steps: int  # DeepSpeed's count of optimizer steps
    has_client_state: bool  # the script has given a client state

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Facts:
        """Return the facts from the values of a checkpoint."""
        meta = values.get(META)
        if not isinstance(meta, dict) or meta.get("version") != _VERSION:
            raise Unsupported(
                f"{where} was not saved by an engine of DeepSpeed, or by a newer version of Holdfast. It was "
                "not changed. Use another home for this training, or upgrade."
            )
        return read_as(cls, meta, f"{where}: its metadata")


def make_state(facts: Facts, files: Mapping[str, Packed]) -> dict[str, Any]:
    """Return the state that the Checkpointer saves for this rank."""
    keyed = {name: (packed_value.partition_key(name, _RESERVED), packed) for name, packed in files.items()}
    state: dict[str, Any] = {key: packed.tree for key, packed in keyed.values()}
    partitions = packed_value.describe_partitions(keyed)
    state[META] = {"version": _VERSION, **to_plain(facts), "partitions": partitions}
    return state


class SavedFiles(Struct, frozen=True):
    """Files of one checkpoint, of all ranks. Every byte is verified."""

    facts: Facts
    own: Mapping[str, Any]  # state that was loaded on this rank; {} if another number of ranks has saved it
    checkpoint: Checkpoint
    owners: Mapping[str, int]  # rank that each file is read from

    @property
    def files(self) -> SavedFiles:
        """These files, which were saved for this number of ranks."""
        return self

    def load(self, name: str) -> Any:
        """Load the content of a file, with tensors on the CPU."""
        own = self.own[META]["partitions"].get(name) if self.own else None
        if own is not None:
            packed = packed_value.packed_of(name, own, self.own[own["key"]])
        elif name in self.owners:
            packed = packed_value.read_partition(self.checkpoint, self.owners[name], META, name)
        else:
            raise NotFound(
                f"{self.facts.tag} (step {self.checkpoint.step}) does not have the file {name!r}. It has "
                f"{sorted(self.owners)}.",
                step=self.checkpoint.step,
                key=name,
            )
        return packed_value.unpack(packed.tree, packed.kinds)


def name_in(folder: str, path: str) -> str | None:
    """Return the name of a file in a folder, or None if it is elsewhere."""
    name = posixpath.relpath(path, folder)
    return None if name.startswith("..") or name == "." else name


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


_log = get_logger("deepspeed")
_homes: dict[tuple[str, int], RunHome] = {}


class RunHome(TrainerRun):
    """Checkpoints of one run. Engines of one process that use the same home share it; collective."""

    def __init__(self, home: Home, options: Mapping[str, Any]) -> None:
        super().__init__(home, None, options)
        self._options = dict(options)
        self._may_save = False  # the home is empty, or the run was continued
        self.last = 0  # step of the newest save or load
        self._save: Save | None = None  # the newest save
        self._step_of: dict[str, int] = {}  # by tag

    @classmethod
    def of(cls, home: Home, options: Mapping[str, Any]) -> RunHome:
        """Return the home, which is opened once per process."""
        key = (str(home.url), id(dist.group.WORLD) if dist.is_initialized() else 0)
        if key not in _homes:
            _homes[key] = cls(home, options)
        if options and _homes[key]._options != dict(options):
            raise InvalidInput(
                f"{home.url} is open in this process with other options ({_homes[key]._options}). Nothing "
                "was changed. Give attach() the same options for the same home."
            )
        return _homes[key]

    # -- saves -----------------------------------------------------------------------------------------------
    def save(self, facts: Facts, files: Mapping[str, Packed], private: Iterable[Optimizer]) -> int:
        """Save the files of this rank under a tag. Returns the step of the checkpoint."""
        if not self._may_save:
            newest = self.ranks.of_rank_0(self.checkpointer.latest_step)
            if newest is not None:
                what = "this engine has not loaded it"
                self.refuse_new_run(newest, what, "saved", "Call engine.load_checkpoint() first")
            self._may_save = True
        step = max(facts.global_steps, self.last + 1)
        self.settle()
        self._save = self.save_step(step, make_state(facts, files), optimizers=private)
        self.last = step
        replaced = self._step_of.get(facts.tag)
        self._step_of[facts.tag] = step
        if replaced is not None and replaced != step:
            self.checkpointer.delete(replaced)
        return step

    def was_dropped(self) -> bool:
        """Return True if a rank has dropped the last save: its memory was written meanwhile."""
        self.wait_copied()
        return any(self.ranks.gather(self._save is not None and isinstance(self._save.failed, InvalidInput)))

    # -- loads -----------------------------------------------------------------------------------------------
    def tags(self) -> list[str]:
        """Return the tags of all checkpoints, each once."""
        return self.ranks.of_rank_0(lambda: list(dict.fromkeys(facts.tag for _, facts in self._list())))

    def load(self, tag: str | None, *, rng: bool) -> SavedFiles | None:
        """Load a checkpoint. Later saves continue from it.

        Returns:
            Its files, or None if the home does not have it.
        """
        if self._may_save and self._step_of:
            self.checkpointer.wait()
        if tag is not None:
            self.checkpointer.continue_from()  # a dead process's save may become complete here
            steps = self._steps_where(lambda facts: facts.tag == tag)
            return self._load_step(steps[0], rng=rng) if steps else None
        found = self._load_step(None, rng=rng)
        if found is None or found.facts.is_latest:
            return found
        steps = self._steps_where(lambda facts: facts.is_latest)
        for step in steps:
            try:
                return self._load_step(step, rng=rng)
            except Corrupt as error:
                _log.warning("step %d of %s is skipped: %s", step, self.home, error)
        if steps:
            raise Corrupt(f"{self.home} has {len(steps)} checkpoints to resume from, and all are damaged.")
        return None

    def continue_after(self) -> None:
        """Continue the run after a checkpoint from outside of the home was loaded."""
        self.last = self.checkpointer.continue_from() or 0
        self._may_save = True

    def _load_step(self, step: int | None, *, rng: bool) -> SavedFiles | None:
        own = self.checkpointer.load(step, rng=rng)
        self._may_save = True
        if own is None:
            return None
        found, attempt = self.checkpointer.restored_step, self.checkpointer.restored_attempt
        assert found is not None
        self.last = found
        facts = Facts.parse(own, f"Step {found} of {self.home}")
        self._step_of[facts.tag] = found
        checkpoint = open_loaded(self.home, found, attempt)
        is_equal = checkpoint.world_size == self.ranks.world_size
        if is_equal:
            every = self.ranks.gather(list(own[META]["partitions"]))
        else:
            parts = range(checkpoint.world_size)
            every = self.ranks.of_rank_0(
                lambda: [list(checkpoint.values(rank)[META]["partitions"]) for rank in parts]
            )
        owners = {name: rank for rank, names in reversed(list(enumerate(every))) for name in names}
        return SavedFiles(facts, own if is_equal else {}, checkpoint, owners)

    def _steps_where(self, is_wanted: Callable[[Facts], bool]) -> list[int]:
        return self.ranks.of_rank_0(lambda: [one.step for one, facts in self._list() if is_wanted(facts)])

    def _list(self) -> list[tuple[CheckpointId, Facts]]:
        """Return the checkpoints with their facts, the newest first. Damaged ones are left out."""
        found: list[tuple[CheckpointId, Facts]] = []
        for step in self.checkpointer.all_steps():
            try:
                checkpoint = holdfast.open(self.home, step)
                facts = Facts.parse(checkpoint.values(), f"Step {step} of {self.home}")
            except HoldfastError as error:
                _log.warning("step %d of %s is skipped: %s", step, self.home, error)
                continue
            found.append((checkpoint.manifest.checkpoint_id, facts))
        return sorted(found, key=lambda row: row[0], reverse=True)
