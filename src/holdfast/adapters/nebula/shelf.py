"""Checkpoints by tag, in all tiers of one place: which there are, which is newest and verifies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.adapters.nebula.location import MapLocation, place
from holdfast.adapters.nebula.packing import Packed, rebuild, unpack
from holdfast.adapters.nebula.tags import META, named_step
from holdfast.callsite import warn
from holdfast.errors import Corrupt, NotFound, SaveWarning, Unsupported
from holdfast.policy import line_of
from holdfast.restore.checkpoint import Checkpoint
from holdfast.restore.find import Home, candidates, check_files, list_home, read_manifest, read_run
from holdfast.state.tree import graft, references
from holdfast.store import Store
from holdfast.store.nearest import Nearest

if TYPE_CHECKING:
    import torch

_VERSION = 1
_UNREADABLE = (Corrupt, NotFound, Unsupported, LookupError, TypeError)
"""What speaks against one checkpoint; a store that fails speaks against none."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One of the places in which checkpoints of a run are; `name` is "memory", "local" or "home"."""

    name: str
    store: Store


@dataclass(frozen=True, slots=True)
class Volume:
    """A complete checkpoint that was saved under a tag."""

    tag: str
    label: str | None  # the path that a framework knows it by
    home: str
    tiers: tuple[str, ...]
    checkpoint: Checkpoint = field(repr=False)
    _metas: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def step(self) -> int:
        """See `Checkpoint.step`."""
        return self.checkpoint.step

    def index_of(self, name: str, rank: int) -> int | None:
        """The part that a rank of training loads a partition from: its own, else the lowest that has it."""
        count = self.checkpoint.world_size
        guess = min(rank, count - 1)  # right wherever all ranks save, or only the first does
        if self._is_own(guess, name, rank):
            return guess
        own = (i for i in range(count) if self._is_own(i, name, rank))
        is_told = self.meta(guess)["rank"] == rank  # its own part is known, and has none
        found = None if is_told else next(own, None)
        if found is not None:
            return found
        return next((i for i in range(count) if name in self.meta(i)["partitions"]), None)

    def _is_own(self, index: int, name: str, rank: int) -> bool:
        meta = self.meta(index)
        return meta["rank"] == rank and name in meta["partitions"]

    def meta(self, index: int) -> dict[str, Any]:
        """What a part tells of its tag and partitions."""
        if index not in self._metas:
            self._metas[index] = self.checkpoint.values(index)[META]
        return self._metas[index]

    def names(self) -> list[str]:
        """The names of all partitions of all ranks."""
        every = (name for i in range(self.checkpoint.world_size) for name in self.meta(i)["partitions"])
        return list(dict.fromkeys(every))

    def packed(self, name: str, index: int) -> Packed:
        """A partition of a part, as it was packed, on the CPU and verified.

        Raises:
            Corrupt: damage was found.
            NotFound: a file is missing.
            RetryLater: the store failed.
        """
        values = self.checkpoint.values(index)
        facts = values[META]["partitions"][name]
        tree = values[facts["key"]]
        names = list(references(tree))
        found = self.checkpoint.tensors(index, keys=names) if names else {}
        kinds = [(tuple(path), kind, detail) for path, kind, detail in facts["kinds"]]
        devices = {tuple(path): device for path, device in facts["devices"]}
        return Packed(graft(tree, found.__getitem__), kinds, devices)

    def load(self, name: str, rank: int, map_location: MapLocation) -> Any:
        """A partition as it was saved: this rank's own if there is one, else the lowest rank's.

        Raises:
            NotFound: no rank has saved it, or a file is missing.
            Corrupt: damage was found.
            RetryLater: the store failed.
        """
        index = self.index_of(name, rank)
        if index is None:
            message = f"{self.tag} (step {self.step}) has no partition {name!r}; it has {self.names()}."
            raise NotFound(message, step=self.step, key=name)
        packed = self.packed(name, index)
        moved: dict[int, torch.Tensor] = {}

        def leaf(path: Any, tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:  # tied ones stay one
                moved[id(tensor)] = place(tensor, packed.devices.get(path, "cpu"), map_location)
            return moved[id(tensor)]

        return unpack(rebuild(packed.tree, leaf), packed.kinds)


class Shelf:
    """The checkpoints of one place.

    Args:
        home: the place, as the session spells it.
        tiers: nearest first; the last is home.
    """

    def __init__(self, home: str, tiers: Sequence[Tier]) -> None:
        self.home = home
        self._tiers = tuple(tiers)
        stores = [tier.store for tier in tiers]
        self._store = stores[0] if len(stores) == 1 else Nearest(stores)

    def volumes(self, *, only_home: bool = False) -> Iterator[Volume]:
        """What was saved under tags, newest first.

        Args:
            only_home: leave out what is not complete in home yet.

        Raises:
            RetryLater: a store failed.
        """
        for found, listings in self._candidates(only_home=only_home):
            try:
                volume = self._open(found, listings)
            except _UNREADABLE:
                continue  # whoever asks for the newest is told, see `newest`
            if volume is not None:
                yield volume

    def find(self, tag: str) -> Volume | None:
        """The newest checkpoint of a tag that can be read; None if there is none.

        Raises:
            RetryLater: a store failed.
        """
        step = named_step(tag)
        ordered = list(self._candidates())
        ordered.sort(key=lambda pair: pair[0][1] != step)  # where it most likely is
        found = self._matching(ordered, tag, step)
        return max(found, key=lambda one: (one.checkpoint.attempt, one.step), default=None)

    def _matching(
        self, ordered: Sequence[tuple[tuple[int, int], Any]], tag: str, step: int | None
    ) -> Iterator[Volume]:
        has_found = False
        for found, listings in ordered:
            if has_found and found[1] != step:
                return
            try:
                volume = self._open(found, listings)
            except _UNREADABLE:
                continue
            if volume is not None and volume.tag == tag:
                has_found = True
                yield volume

    def newest(self, *, only_home: bool = False, verified: set[tuple[int, int]]) -> Volume | None:
        """The newest checkpoint of which every byte is as it was saved; None if none was saved under a tag.

        What is passed over for damage is told as a SaveWarning. What a newer attempt went back behind is not
        taken.

        Args:
            only_home: leave out what is not complete in home yet.
            verified: (attempt, step) of what need not be verified again; grows.

        Raises:
            Corrupt: there are some, but all are damaged.
            RetryLater: a store failed.

        Blocks: until it has been read once.
        """
        every = list(self._candidates(only_home=only_home))
        passed: list[str] = []
        line: frozenset[tuple[int, int]] | None = None
        for found, listings in every:
            if line is not None and found not in line:
                continue
            attempt, step = found
            try:
                volume = self._open(found, listings)
                if volume is None:
                    continue
                manifest = volume.checkpoint.manifest
                if line is None:
                    line = frozenset(line_of([one for one, _ in every], found, manifest.ancestors).current)
                if found not in verified:
                    check_files(list(listings.values()), manifest)
                    self._verify(volume)
                    verified.add(found)
            except _UNREADABLE as error:
                passed.append(f"step {step} of attempt {attempt}: {error}")
                continue
            for one in passed:
                message = (
                    f"{volume.tag} is taken as the newest checkpoint, since a newer one is damaged: {one}"
                )
                warn(message, SaveWarning)
            return volume
        if passed:
            told = "".join(f"\n  {one}" for one in passed)
            message = f"{self._store.url} holds checkpoints, but none of them verifies.{told}"
            raise Corrupt(message)
        return None

    def _verify(self, volume: Volume) -> None:
        report = volume.checkpoint.verify()
        if not report.is_good:
            raise Corrupt(report.problems[0].message, step=volume.step)

    def _candidates(self, *, only_home: bool = False) -> Iterator[tuple[tuple[int, int], dict[str, Home]]]:
        """(attempt, step) of all complete checkpoints, newest first, with the tiers' listings by name."""
        listings = {tier.name: list_home(tier.store) for tier in self._tiers}
        shown = [self._tiers[-1].name] if only_home else list(listings)
        found = {one for name in shown for one in candidates(listings[name])}
        return ((one, listings) for one in sorted(found, reverse=True))

    def _open(self, found: tuple[int, int], listings: dict[str, Home]) -> Volume | None:
        """A checkpoint, or None if it was not saved under a tag."""
        attempt, step = found
        run = read_run(self._store)
        checkpoint = Checkpoint(
            self._store, read_manifest(self._store, step, attempt, run.id if run else None)
        )
        meta = checkpoint.values(0).get(META)
        if not isinstance(meta, dict):
            return None
        tiers = tuple(name for name, home in listings.items() if _has(name, home, step, attempt))
        volume = Volume(meta["tag"], meta.get("label"), self.home, tiers, checkpoint)
        # Ranks may have completed a tag of which none had a file.
        is_empty = not any(volume.meta(i)["partitions"] for i in range(checkpoint.world_size))
        return None if is_empty else volume

    def __contains__(self, found: tuple[int, int]) -> bool:
        """Whether a checkpoint, given as (attempt, step), is complete in home."""
        attempt, step = found
        saved = list_home(self._tiers[-1].store, step=step).saved.get((step, attempt))
        return saved is not None and saved.is_committed

    def last_step(self) -> int | None:
        """The step of the newest complete checkpoint whose manifest can be read; None if there is none."""
        for (attempt, step), _ in self._candidates():
            with contextlib.suppress(Corrupt, NotFound, Unsupported):
                read_manifest(self._store, step, attempt, None)
                return step
        return None


def _has(tier: str, home: Home, step: int, attempt: int) -> bool:
    """Whether a checkpoint is complete in a tier; of memory, whether some file is there."""
    saved = home.saved.get((step, attempt))
    return saved is not None and (saved.is_committed or (tier == "memory" and bool(saved.data)))


def meta_of(
    tag: str, label: str | None, rank: int, partitions: dict[str, tuple[str, Packed]]
) -> dict[str, Any]:
    """What a part tells of its tag and partitions, for `Volume` to read.

    Args:
        tag: the tag.
        label: the path that a framework knows it by.
        rank: of training.
        partitions: by name, the key of each and what is in it.
    """
    told = {
        name: {
            "key": key,
            "kinds": [[list(path), kind, detail] for path, kind, detail in packed.kinds],
            "devices": [[list(path), device] for path, device in packed.devices.items()],
        }
        for name, (key, packed) in partitions.items()
    }
    return {"version": _VERSION, "tag": tag, "label": label, "rank": rank, "partitions": told}
