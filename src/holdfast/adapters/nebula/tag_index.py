"""Index of checkpoints by tag, in all tiers of one home, and files of other libraries that refer to one."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from holdfast.checkpoint.exchange import packed_value
from holdfast.checkpoint.exchange.packed_value import Packed
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import check_files
from holdfast.checkpoint.home.listing import Listing, candidates, list_home
from holdfast.checkpoint.home.newest import (
    LIMIT_S,
    Patience,
    Skipped,
    from_listing,
    list_patiently,
    usable,
    was_deleted,
)
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.restore.verify import check_verified
from holdfast.checkpoint.retention import line_of
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.documents import decode_as, read_as, to_plain

META = "nebula"
"""Top-level key of a checkpoint's tag and partitions."""
EXPLICIT = -2
"""Number of files of a checkpoint that `commit` completes."""
_STEP = re.compile(r"global_step([0-9]{1,15})")
_RESERVED = frozenset({META, "rng"})


def check_tag(tag: Any) -> str:
    """Return a tag, if it is valid."""
    if not isinstance(tag, str) or not tag:
        raise InvalidInput(f"A tag must be a string such as 'global_step500', not {tag!r}.")
    return tag


def check_num_of_files(count: Any) -> int | None:
    """Return a number of files, if it is valid."""
    is_number = isinstance(count, int) and not isinstance(count, bool)
    if count is None or (is_number and (count == EXPLICIT or count >= 1)):
        return count
    raise InvalidInput(
        f"num_of_files must be 1 or more, or -2 for a checkpoint that commit() completes, not {count!r}."
    )


def named_step(tag: str) -> int | None:
    """Return the step in a tag: 500 for "global_step500", None for other tags."""
    found = _STEP.fullmatch(tag)
    return int(found[1]) if found else None


def next_step(tag: str, last: int | None) -> int:
    """Return the step of a new tag: the step in its name if that is new, or else the next number."""
    named = named_step(tag)
    if named is not None and (last is None or named > last):
        return named
    return 1 if last is None else last + 1


def goes_back(tag: str, last: int | None, loaded: int | None) -> bool:
    """Return True if a tag repeats steps after an older checkpoint was loaded.

    Loading an older checkpoint and continuing with new steps is not going back.
    """
    named = named_step(tag)
    return None not in (named, last, loaded) and named <= last and loaded < last  # type: ignore[operator]


def key_of(name: Any) -> str:
    """Return the key of a partition: its name, with characters escaped that keys cannot have."""
    return packed_value.partition_key(name, _RESERVED)


MapLocation = Any
"""None, a device, its name, a mapping of names, or a function of a storage and its name."""


def place(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """Return a tensor on the device that `map_location` selects, by the rules of `torch.load`."""
    choose: Any = torch.serialization._get_restore_location(map_location)
    try:
        storage = choose(tensor.untyped_storage(), location)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise InvalidInput(
            f"A tensor that was saved from {location} cannot be placed with map_location={map_location!r} "
            f"here ({error}). Nothing was loaded. Pass map_location='cpu' or another device."
        ) from error
    plain = storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()
    found = torch.empty(0, dtype=tensor.dtype, device=plain.device)
    return found.set_(plain, tensor.storage_offset(), tensor.size(), tensor.stride())


class TagMeta(Struct, frozen=True):
    """Values of a part of a checkpoint that name its tag and its partitions."""

    version: int
    tag: str
    label: str | None  # path by which a framework refers to it
    rank: int
    partitions: dict[str, Any]  # by name, as `describe_partitions` makes them


class TaggedCheckpoint(Struct):
    """Complete checkpoint that was saved under a tag."""

    home: str
    tiers: tuple[str, ...]
    checkpoint: Checkpoint
    metas: dict[int, TagMeta] = {}  # of its parts, as far as they were read

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return self.checkpoint.step

    @property
    def tag(self) -> str:
        """Tag of the checkpoint."""
        return self.meta(0).tag

    def index_of(self, name: str, rank: int) -> int:
        """Return the index of the part to load from: the rank's own, or the lowest that has the partition."""
        every = range(self.checkpoint.world_size)
        guess = min(rank, every[-1])  # right if all ranks save, or only the first does: no other part is read
        is_own = self.meta(guess).rank == rank
        own = [guess] if is_own else (i for i in every if self.meta(i).rank == rank)
        for index in itertools.chain(own, every):
            if name in self.meta(index).partitions:
                return index
        raise NotFound(
            f"{self.tag} (step {self.step}) has no partition {name!r}. It has {self.names()}.",
            step=self.step,
            key=name,
        )

    def meta(self, index: int) -> TagMeta:
        """Return the metadata of a part's tag and partitions."""
        if index not in self.metas:
            meta = self.checkpoint.values(index).get(META)
            self.metas[index] = read_as(TagMeta, meta, f"The metadata of part {index} of {self.checkpoint!r}")
        return self.metas[index]

    def names(self) -> list[str]:
        """Return the names of all partitions of all ranks."""
        every = (name for i in range(self.checkpoint.world_size) for name in self.meta(i).partitions)
        return list(dict.fromkeys(every))

    def packed(self, name: str, index: int) -> Packed:
        """Return a packed partition of a part, on the CPU and verified."""
        return packed_value.read_partition(self.checkpoint, index, META, name)

    def load(self, name: str, rank: int, map_location: MapLocation) -> Any:
        """Load a partition: this rank's own, or else the lowest rank's."""
        packed = self.packed(name, self.index_of(name, rank))
        moved: dict[int, torch.Tensor] = {}

        def leaf(path: Any, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:  # tied tensors stay tied
                moved[id(tensor)] = place(tensor, packed.devices.get(path, "cpu"), map_location)
            return moved[id(tensor)]

        placed = packed_value.rebuild(packed.tree, leaf)
        with packed_value.checked_metadata(name):
            return packed_value.unpack(placed, packed.kinds)


class TagIndex:
    """Checkpoints of one home, in its tiers "memory", "local" and "home", the nearest first."""

    def __init__(self, home: str, tiers: Mapping[str, Store]) -> None:
        self.home, self._tiers = home, tiers
        self._store = tiers["home"] if len(tiers) == 1 else TieredStore(list(tiers.values()))

    def checkpoints(self, likely_step: int | None = None) -> Iterator[TaggedCheckpoint]:
        """Yield the checkpoints that were saved under tags: those of a likely step, then the newest first."""
        found, listings = self._candidates()
        found.sort(key=lambda checkpoint: checkpoint.step != likely_step)
        # `newest` warns about damage.
        return usable(self._store, found, partial(self._open, listings), _make_patience())

    def find(self, tag: str) -> TaggedCheckpoint | None:
        """Return the newest readable checkpoint of a tag, or None."""
        every = self.checkpoints(named_step(tag))
        return next((tagged for tagged in every if tagged.tag == tag), None)

    def newest(self, *, only_home: bool = False, verified: set[CheckpointId]) -> TaggedCheckpoint | None:
        """Return the newest checkpoint with valid bytes, or None without a tagged checkpoint.

        A SaveWarning names damaged checkpoints that are skipped. Superseded checkpoints are skipped too. A
        checkpoint that cannot be read is tried again, and then raises.
        """
        return from_listing(lambda: self._newest_listed(verified, only_home=only_home))

    def _newest_listed(self, verified: set[CheckpointId], *, only_home: bool) -> TaggedCheckpoint | None:
        every, listings = self._candidates(only_home=only_home)
        skipped: dict[Skipped, HoldfastError] = {}
        line: frozenset[CheckpointId] | None = None

        def open_one(manifest: Manifest) -> TaggedCheckpoint | None:
            nonlocal line
            found = manifest.checkpoint_id
            tagged = self._open(listings, manifest) if line is None or found in line else None
            if tagged is None:
                return None
            if line is None:
                line = frozenset(line_of(every, found, manifest.ancestors).current)
            if found not in verified:
                check_files(list(listings.values()), manifest)
                check_verified(tagged.checkpoint.verify())
                verified.add(found)
            return tagged

        tagged = next(usable(self._store, every, open_one, _make_patience(), skipped), None)
        damaged = [
            f"step {skip.step} of attempt {skip.attempt}: {skip.reason}"
            for skip in skipped
            if not was_deleted(self._store, skip.checkpoint_id)  # by its run, meanwhile
        ]
        if tagged is not None:
            for damage in damaged:
                warn(
                    f"{tagged.tag} is used as the newest checkpoint, because a newer one is damaged: "
                    f"{damage}",
                    SaveWarning,
                )
        elif damaged:
            reasons = "".join(f"\n  {damage}" for damage in damaged)
            raise Corrupt(f"{self._store.url} has checkpoints, but all of them are damaged.{reasons}")
        elif skipped:
            raise NotFound(f"All checkpoints in {self._store.url} were deleted while they were read.")
        return tagged

    def _candidates(self, *, only_home: bool = False) -> tuple[list[CheckpointId], dict[str, Listing]]:
        """Return all complete checkpoints, newest first, and the tiers' listings."""
        listings = {name: list_patiently(store, _make_patience()) for name, store in self._tiers.items()}
        found = {one for name in (["home"] if only_home else listings) for one in candidates(listings[name])}
        return sorted(found, reverse=True), listings

    def _open(self, listings: dict[str, Listing], manifest: Manifest) -> TaggedCheckpoint | None:
        """Return a checkpoint, or None if it was not saved under a tag."""
        checkpoint, found = Checkpoint(self._store, manifest), manifest.checkpoint_id
        if not isinstance(checkpoint.values(0).get(META), dict):
            return None
        tiers = tuple(name for name, listing in listings.items() if _is_complete(listing, found, name))
        tagged = TaggedCheckpoint(self.home, tiers, checkpoint)
        # Ranks may have completed a tag without any file. The first part with one is enough.
        has_files = any(tagged.meta(index).partitions for index in range(checkpoint.world_size))
        return tagged if has_files else None

    def tiers_of(self, found: CheckpointId) -> list[str]:
        """Return the tiers that have a checkpoint now. Home is listed last, so a copy on its way is seen."""
        every = self._tiers.items()
        return [name for name, store in every if _is_complete(list_home(store, step=found.step), found, name)]

    def last_step(self) -> int | None:
        """Return the step of the newest checkpoint with a readable manifest, or None."""
        found, _ = self._candidates()
        return next(usable(self._store, found, lambda manifest: manifest.step, _make_patience()), None)


def _make_patience() -> Patience:
    return Patience(LIMIT_S, lambda line: warn(line, SaveWarning))


_FIRST_LINE = "This is no file of torch.save: the state is in a Holdfast checkpoint.\n"
_LIMIT_BYTES = 64 << 10


class PartitionMarker(Struct, frozen=True):
    """Reference to a partition of a checkpoint, in a file."""

    home: str
    tag: str
    partition: str

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the marker to a path, replacing any file."""
        with atomic_file(Path(path), overwrite=True) as partial:
            partial.write_text(_FIRST_LINE + json.dumps(to_plain(self)) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PartitionMarker | None:
        """Read the marker at a path. Returns None if the file is missing or not a marker."""
        file = Path(path)
        if not file.is_file() or file.stat().st_size > _LIMIT_BYTES:
            return None
        text = file.read_bytes()
        if not text.startswith(_FIRST_LINE.encode()):
            return None
        return decode_as(cls, text[len(_FIRST_LINE) :], str(path), any_text=True)


def _is_complete(listing: Listing, found: CheckpointId, tier: str) -> bool:
    saved = listing.saved.get(found)
    if saved is None:
        return False
    return saved.is_committed or (tier == "memory" and bool(saved.data))  # in memory, one file is enough
