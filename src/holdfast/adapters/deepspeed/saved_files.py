"""Files of DeepSpeed as a state of a Checkpointer, and the way back."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from holdfast.checkpoint.exchange.packed_value import Packed, pack, unpack
from holdfast.checkpoint.exchange.partitions import (
    describe_partitions,
    packed_of,
    partition_key,
    read_partition,
)
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.errors import Corrupt, NotFound, Unsupported

META = "deepspeed"
"""Top-level key of the facts about a save."""
_VERSION = 1
_RESERVED = frozenset({META, "rng"})


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about one save of an engine.

    Attributes:
        tag: DeepSpeed's name of the checkpoint.
        is_latest: a load without a tag may take it.
        global_steps: DeepSpeed's count of optimizer steps.
        has_client_state: the script has given a client state.
    """

    tag: str
    is_latest: bool
    global_steps: int
    has_client_state: bool

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Facts:
        """Return the facts from the values of a checkpoint.

        Raises:
            Unsupported: an engine did not save it, or a newer version of Holdfast did.
        """
        meta = values.get(META)
        if not isinstance(meta, dict) or meta.get("version") != _VERSION:
            raise Unsupported(
                f"{where} was not saved by an engine of DeepSpeed, or by a newer version of Holdfast. It was "
                "not changed. Use another home for this training, or upgrade."
            )
        try:
            return cls(**{one.name: meta[one.name] for one in fields(cls)})
        except KeyError as error:
            raise Corrupt(f"{where} lacks {error} in its metadata.") from error


def pack_file(value: Any, name: str) -> Packed:
    """Return the content of a file, ready to be saved. Its tensors are not copied.

    Raises:
        InvalidInput, Unsupported: a value cannot be saved. The message has its key path.
    """
    packed = pack(value, name)
    packed.check(name)
    return packed


def make_state(facts: Facts, files: Mapping[str, Packed]) -> dict[str, Any]:
    """Return the state that the Checkpointer saves for this rank."""
    keyed = {name: (partition_key(name, _RESERVED), packed) for name, packed in files.items()}
    state: dict[str, Any] = {key: packed.tree for key, packed in keyed.values()}
    state[META] = {"version": _VERSION, **asdict(facts), "partitions": describe_partitions(keyed)}
    return state


def file_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the files that a rank has saved."""
    return list(values[META]["partitions"])


class SavedFiles:
    """Files of one checkpoint, of all ranks. Every byte is verified.

    Args:
        facts: facts about the save.
        own: this rank's content, which is loaded already; {} if other numbers of ranks have saved it.
        checkpoint: the same checkpoint, opened for the files of other ranks.
        owners: lowest rank that has saved each file.
    """

    def __init__(
        self, facts: Facts, own: Mapping[str, Any], checkpoint: Checkpoint, owners: Mapping[str, int]
    ) -> None:
        self.facts = facts
        self.owners = owners
        self.checkpoint = checkpoint
        self._own = own

    @property
    def files(self) -> SavedFiles:
        """These files, which were saved for this number of ranks."""
        return self

    def load(self, name: str) -> Any:
        """Load the content of a file, with tensors on the CPU.

        Raises:
            NotFound: the checkpoint does not have the file.
            Corrupt: the checkpoint is damaged.
            RetryLater: the store failed.
        """
        packed = self._find(name)
        return unpack(packed.tree, packed.kinds)

    def _find(self, name: str) -> Packed:
        own = self._own[META]["partitions"].get(name) if self._own else None
        if own is not None:
            return packed_of(name, own, self._own[own["key"]])
        if name not in self.owners:
            raise NotFound(
                f"{self.facts.tag} (step {self.checkpoint.step}) does not have the file {name!r}. It has "
                f"{sorted(self.owners)}.",
                step=self.checkpoint.step,
                key=name,
            )
        return read_partition(self.checkpoint, self.owners[name], META, name)


def name_in(folder: str, path: str) -> str | None:
    """Return the name of a file in a folder, or None if it is elsewhere."""
    name = posixpath.relpath(path, folder)
    return None if name.startswith("..") or name == "." else name
