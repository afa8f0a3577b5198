"""Parts of one checkpoint, each read once, and the shards of tensors in them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format.layout import Region, Shard
from holdfast.checkpoint.format.manifest import EACH, Manifest, Tensor
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.format.value_index import INDEX, ValueIndex
from holdfast.checkpoint.home.documents import read_part
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound
from holdfast.system.units import plural


class Located(Struct, frozen=True):
    """A shard, with its position in a data file."""

    rank: int  # the rank that wrote it
    shard: Shard
    start: int  # its first byte in the data file


class Parts:
    """Parts of a checkpoint, read on demand. Not thread-safe."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.manifest = manifest
        self.store = store
        self._parts: dict[int, Part] = {}
        self._structures: dict[int, list[int]] = {}  # by rank
        self._shards: dict[int, dict[str, list[tuple[Shard, int]]]] = {}

    def part(self, rank: int) -> Part:
        """Return the part of a rank."""
        if not 0 <= rank < self.manifest.world_size:
            count, step = self.manifest.world_size, self.manifest.step
            raise InvalidInput(
                f"Step {step} was saved by {plural(count, 'rank')} (0 to {count - 1}); "
                f"rank {rank} does not exist.",
                step=step,
                rank=rank,
            )
        if rank not in self._parts:
            self._parts[rank] = read_part(self.store, self.manifest, rank)
        return self._parts[rank]

    def shards_of(self, name: str, rank: int, region: Region | None = None) -> Iterator[Located]:
        """Yield the saved regions that together hold a region of a tensor. Leaves out empty ones.

        Reads only the parts of the ranks that wrote them. `name` is no alias, and `rank` is as for `holder`.
        """
        tensor = self.manifest.tensors[name]
        if tensor.partitioning is None:
            owner = self.holder(name, rank)
            shard, start = self._held(name, owner, NotFound)[0]
            yield Located(owner, shard, start)
            return
        wanted = Region.whole(tensor.shape) if region is None else region
        for owner, expected in tensor.partitioning.touching(wanted, tensor.shape):
            held = self._held(name, owner, Corrupt)
            for shard, start in held:
                if (shard.dtype, shard.shape, shard.region) == (tensor.dtype, tensor.shape, expected):
                    yield Located(owner, shard, start)
                    break
            else:
                raise Corrupt(
                    f"The manifest of step {self.manifest.step} and the part of rank {owner} differ for "
                    f"{name}: expected {expected} of {tensor.dtype}{list(tensor.shape)} on this rank, found "
                    f"{', '.join(str(row[0]) for row in held[:8])}.",
                    step=self.manifest.step,
                    rank=owner,
                    key=name,
                )

    def _held(self, name: str, rank: int, error: type[HoldfastError]) -> list[tuple[Shard, int]]:
        """Return the shards of a tensor that a rank wrote, with their first bytes. There is at least one."""
        held = self._shards_in(rank).get(name)
        if held is None:
            raise error(
                f"The manifest of step {self.manifest.step} names {name}, but rank {rank} did not save it.",
                step=self.manifest.step,
                rank=rank,
                key=name,
            )
        return held

    def structures(self, rank: int) -> list[int]:
        """Return one rank per distinct catalog, `rank` itself first. Their parts hold all values."""
        own, parts = rank % self.manifest.world_size, self.manifest.parts
        if own not in self._structures:  # once: thousands of names may ask for it
            first_of = {one.catalog: one.rank for one in reversed(parts) if one.catalog != parts[own].catalog}
            self._structures[own] = [own, *sorted(first_of.values())]
        return self._structures[own]

    def value_index(self) -> ValueIndex | None:
        """Return the index of the values that the ranks have divided; None if each has saved its own."""
        first = self.part(0)
        if INDEX not in first.values:
            return None
        try:
            return ValueIndex.parse(first.values[INDEX], first.world_size)
        except Corrupt as error:
            raise Corrupt(
                f"{first.what} has an index of values that cannot be read: {error}",
                step=first.step,
                rank=0,
                key=INDEX,
            ) from error

    def holder(self, name: str, rank: int) -> int:
        """Return the rank whose copy of a per-rank tensor is loaded by `rank`.

        It is `rank` modulo the saved world size. If that rank did not save the tensor, it is the first of
        `structures` that did: ranks that were in another pipeline stage need a buffer of this one.
        """
        own = rank % self.manifest.world_size
        for saved in self.structures(rank):
            if name in self._shards_in(saved):
                return saved
        return own

    def shape_of(self, name: str, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """Return dtype and shape of a rank's tensor; None for a per-rank tensor that was not saved for it.

        Ranks may differ in the shape of a per-rank tensor; the manifest has that of the first rank.
        """
        tensor = self.manifest.tensors[name]
        if tensor.owner != EACH:
            return tensor.dtype, tensor.shape
        held = self._shards_in(self.holder(name, rank)).get(name)
        return None if held is None else (held[0][0].dtype, held[0][0].shape)

    def tensors_for(self, rank: int) -> dict[str, Tensor]:
        """Return the manifest's tensors by name, per-rank ones as a rank has saved them."""
        tensors = dict(self.manifest.tensors)
        for name, tensor in self.manifest.tensors.items():
            saved = self.shape_of(name, rank) if tensor.owner == EACH else None
            if saved is not None:
                tensors[name] = replace(tensor, dtype=saved[0], shape=saved[1])
        return tensors

    def _shards_in(self, rank: int) -> dict[str, list[tuple[Shard, int]]]:
        if rank not in self._shards:
            part = self.part(rank)
            found = self._shards[rank] = {}
            for shard, start in zip(part.shards, part.starts, strict=True):
                found.setdefault(shard.name, []).append((shard, start))
        return self._shards[rank]
