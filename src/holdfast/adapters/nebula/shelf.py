"""Checkpoints by tag, in all tiers of one place: which there are, which is newest and verifies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.adapters.nebula.location import MapLocation, place
from holdfast.adapters.nebula.packing import Packed, rebuild, unpack
from holdfast.adapters.nebula.tags import META, named_step
from holdfast.callsite import warn
from holdfast.errors import Corrupt, HoldfastError, NotFound, SaveWarning
from holdfast.home.documents import check_files, read_manifest, read_run
from holdfast.home.listing import Listing, candidates, list_home
from holdfast.home.newest import list_patiently, usable
from holdfast.home.patience import LIMIT_S, Patience
from holdfast.home.skipped import Passed
from holdfast.policy import line_of
from holdfast.restore.checkpoint import Checkpoint
from holdfast.restore.verify import check_verified
from holdfast.state.tree import graft, references
from holdfast.store import Store
from holdfast.store.nearest import Nearest

if TYPE_CHECKING:
    import torch

_VERSION = 1
_T = TypeVar("_T")


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise Corrupt for what is wrong in the block with the facts of a partition."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"The facts of the partition {name!r} are damaged, or not the Nebula adapter's: {error!r}."
        raise Corrupt(message, key=name) from error


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
        with reading(name):
            facts = values[META]["partitions"][name]
            tree = values[facts["key"]]
            kinds = [(tuple(path), kind, detail) for path, kind, detail in facts["kinds"]]
            devices = {tuple(path): str(device) for path, device in facts["devices"]}
        names = list(references(tree))
        found = self.checkpoint.tensors(index, keys=names) if names else {}
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

        placed = rebuild(packed.tree, leaf)
        with reading(name):
            return unpack(placed, packed.kinds)


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
        found, listings = self._candidates(only_home=only_home)
        return self._usable(found, lambda one: self._open(one, listings))  # `newest` warns of damage

    def find(self, tag: str) -> Volume | None:
        """The newest checkpoint of a tag that can be read; None if there is none.

        Raises:
            RetryLater: a store failed.
        """
        step = named_step(tag)
        found, listings = self._candidates()
        found.sort(key=lambda one: one[1] != step)  # where it most likely is
        has_found = False

        def take(one: tuple[int, int]) -> Volume | None:
            nonlocal has_found
            volume = self._open(one, listings) if not has_found or one[1] == step else None
            if volume is None or volume.tag != tag:
                return None
            has_found = True
            return volume

        matching = self._usable(found, take)
        return max(matching, key=lambda one: (one.checkpoint.attempt, one.step), default=None)

    def newest(self, *, only_home: bool = False, verified: set[tuple[int, int]]) -> Volume | None:
        """The newest checkpoint of which every byte is as it was saved; None if none was saved under a tag.

        What is passed over for damage is told as a SaveWarning. What a newer attempt went back behind is not
        taken. What cannot be read is tried again, and then raised.

        Args:
            only_home: leave out what is not complete in home yet.
            verified: (attempt, step) of what need not be verified again; grows.

        Raises:
            Corrupt: there are some, but all are damaged.
            RetryLater: a store failed.

        Blocks: until it has been read once.
        """
        every, listings = self._candidates(only_home=only_home)
        passed: list[Passed] = []
        line: frozenset[tuple[int, int]] | None = None

        def take(found: tuple[int, int]) -> Volume | None:
            nonlocal line
            volume = self._open(found, listings) if line is None or found in line else None
            if volume is None:
                return None
            manifest = volume.checkpoint.manifest
            if line is None:
                line = frozenset(line_of(every, found, manifest.ancestors).current)
            if found not in verified:
                check_files(list(listings.values()), manifest)
                check_verified(volume.checkpoint.verify())
                verified.add(found)
            return volume

        for volume in self._usable(every, take, on_passed=lambda one, _: passed.append(one)):
            for one in passed:
                message = (
                    f"{volume.tag} is taken as the newest checkpoint, since a newer one is damaged: step "
                    f"{one.step} of attempt {one.attempt}: {one.reason}"
                )
                warn(message, SaveWarning)
            return volume
        if passed:
            told = "".join(f"\n  step {one.step} of attempt {one.attempt}: {one.reason}" for one in passed)
            message = f"{self._store.url} holds checkpoints, but none of them verifies.{told}"
            raise Corrupt(message)
        return None

    def _usable(
        self,
        found: Sequence[tuple[int, int]],
        take: Callable[[tuple[int, int]], _T | None],
        on_passed: Callable[[Passed, HoldfastError], None] = lambda passed, error: None,
    ) -> Iterator[_T]:
        return usable(
            found,
            lambda attempt, step: take((attempt, step)),
            url=self._store.url,
            patience=_make_patience(),
            on_passed=on_passed,
        )

    def _candidates(self, *, only_home: bool = False) -> tuple[list[tuple[int, int]], dict[str, Listing]]:
        """(attempt, step) of all complete checkpoints, newest first, and the tiers' listings by name."""
        listings = {tier.name: list_patiently(tier.store, _make_patience()) for tier in self._tiers}
        shown = [self._tiers[-1].name] if only_home else list(listings)
        found = {one for name in shown for one in candidates(listings[name])}
        return sorted(found, reverse=True), listings

    def _open(self, found: tuple[int, int], listings: dict[str, Listing]) -> Volume | None:
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
        try:
            volume = Volume(meta["tag"], meta.get("label"), self.home, tiers, checkpoint)
            # Ranks may have completed a tag of which none had a file.
            is_empty = not any(volume.meta(i)["partitions"] for i in range(checkpoint.world_size))
        except (LookupError, TypeError) as error:
            message = f"Step {step} of attempt {attempt} does not describe its tag as it must: {error!r}."
            raise Corrupt(message, step=step) from error
        return None if is_empty else volume

    def __contains__(self, found: tuple[int, int]) -> bool:
        """Whether a checkpoint, given as (attempt, step), is complete in home."""
        attempt, step = found
        saved = list_home(self._tiers[-1].store, step=step).saved.get((step, attempt))
        return saved is not None and saved.is_committed

    def last_step(self) -> int | None:
        """The step of the newest complete checkpoint whose manifest can be read; None if there is none."""
        found, _ = self._candidates()
        steps = self._usable(found, lambda one: read_manifest(self._store, one[1], one[0], None).step)
        return next(steps, None)


def _make_patience() -> Patience:
    return Patience(LIMIT_S, lambda line: warn(line, SaveWarning))


def _has(tier: str, home: Listing, step: int, attempt: int) -> bool:
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
