"""Save plan: the tensors that this rank writes, and their positions in its files, kept by structure."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from holdfast.checkpoint.format.catalog import Catalog, catalog_text
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.layout import FileLayout, Region, Shard, lay_out
from holdfast.checkpoint.stage.arena import Arena
from holdfast.checkpoint.stage.watch import LARGE_BYTES
from holdfast.checkpoint.state.tensors import NAMES, torch_dtype

WITNESS_ALIGNMENT = 64
"""Bytes that the offset of each witness in the arena is a multiple of."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Files of one rank, valid while the structure of the state stays the same.

    An arena holds the image of the data file and, from the next whole page on, that of the file of frozen
    tensors, if there are any.
    """

    names: tuple[str, ...]  # of the tensors this rank writes, in the order of `shards`
    live_names: tuple[str, ...]  # of all tensors that may be copied: these, and the witnesses
    lasting: tuple[int, ...]  # indices of tensors without an owner, in memory that lasts from save to save
    background: tuple[int, ...]  # indices of tensors that an optimizer owns
    frozen: tuple[int, ...]  # indices of tensors that no optimizer trains
    large: frozenset[int]  # indices of tensors that may be copied in the background
    shards: tuple[Shard, ...]
    starts: tuple[int, ...]  # of each shard in its file
    file: FileLayout
    frozen_file: FileLayout | None
    num_bytes: int  # of both files
    frozen_at: int  # offset of the second file's image in the arena
    image_bytes: int  # of an arena for both images
    witness_at: int  # offset of the witnesses in the arena
    arena_bytes: int  # of an arena for both images and the witnesses of one save
    catalog: bytes  # from `catalog_text`
    catalog_digest: str
    own: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, start of own tensors
    shared_starts: tuple[int, ...]  # of all other shards
    is_cuda: bool  # some of the tensors are on a device
    witnesses: tuple[str, ...] = ()  # tensors that others write; their indices follow those of `names`
    calm_witnesses: frozenset[int] = frozenset()  # indices of those that only an optimizer changes
    witness_sizes: tuple[int, ...] = ()  # bytes of each witness
    places: Mapping[int, Region] = field(default_factory=dict)  # of live tensors, by index: what is copied
    number: int = field(default_factory=lambda: next(_numbers))

    @classmethod
    def make(
        cls,
        tensors: Mapping[str, torch.Tensor],
        *,
        catalog: Catalog,
        per_rank: Collection[str],
        owned: Collection[str],
        rank: int,
        temporary: Collection[str] = (),
        witnesses: Collection[str] = (),
        witness_bytes: int = 0,
        places: Mapping[str, Mapping[Region, Region]] = MappingProxyType({}),
    ) -> SavePlan:
        """Make the plan of `rank`.

        Args:
            tensors: this rank's tensors, or its regions of them, by name.
            catalog: the tensors that this rank holds, without its own ones, whose names are `per_rank`.
            owned: names of tensors that only an optimizer's step changes.
            temporary: names of tensors in memory that their object may release.
            witnesses: names of tensors that are not written, but copied at some saves to be hashed.
            witness_bytes: most bytes of the witnesses of one save, each from `WITNESS_ALIGNMENT` on.
            places: by name, for tensors that hold more than the saved regions: where each region is in them.
        """
        shards = list(catalog.shards_of(rank))
        shards += [
            Shard.whole(name, NAMES[tensor.dtype], tuple(tensor.shape), per_rank=True)
            for name, tensor in tensors.items()
            if name in per_rank
        ]
        frozen = [i for i, shard in enumerate(shards) if shard.frozen]
        changing = [i for i, shard in enumerate(shards) if not shard.frozen]
        file = lay_out([shards[i] for i in changing], rank)
        frozen_file = lay_out([shards[i] for i in frozen], rank) if frozen else None
        starts = dict(zip(changing, file.starts, strict=True))
        if frozen_file is not None:
            starts |= zip(frozen, frozen_file.starts, strict=True)
        others = {len(shards) + i: name for i, name in enumerate(witnesses)}
        regions = [(i, one.name, Region(one.offsets, one.sizes)) for i, one in enumerate(shards)]
        placed = {i: places[name][region] for i, name, region in regions if name in places}
        placed |= {i: next(iter(places[name].values())) for i, name in others.items() if name in places}
        sizes = {
            i: placed[i].num_items * tensors[name].itemsize if i in placed else tensors[name].nbytes
            for i, name in others.items()
        }
        large = {i for i, shard in enumerate(shards) if shard.num_bytes >= LARGE_BYTES}
        large |= {i for i, num_bytes in sizes.items() if num_bytes >= LARGE_BYTES}
        text = catalog_text(catalog)
        shard_names = tuple(shard.name for shard in shards)
        num_bytes = file.file_bytes + (frozen_file.file_bytes if frozen_file else 0)
        frozen_at = _aligned(file.file_bytes, mmap.PAGESIZE)
        image_bytes = frozen_at + frozen_file.file_bytes if frozen_file else file.file_bytes
        witness_at = _aligned(image_bytes, WITNESS_ALIGNMENT)
        return cls(
            names=shard_names,
            live_names=shard_names + tuple(witnesses),
            lasting=tuple(i for i in changing if shards[i].name not in {*owned, *temporary}),
            background=tuple(i for i in changing if shards[i].name in owned),
            frozen=tuple(frozen),
            large=frozenset(large),
            shards=tuple(shards),
            starts=tuple(starts[i] for i in range(len(shards))),
            file=file,
            frozen_file=frozen_file,
            num_bytes=num_bytes,
            frozen_at=frozen_at,
            image_bytes=image_bytes,
            witness_at=witness_at,
            arena_bytes=witness_at + witness_bytes if witness_bytes else image_bytes,
            catalog=text,
            catalog_digest=digest(text),
            own=tuple((s.name, s.dtype, s.shape, starts[i]) for i, s in enumerate(shards) if s.per_rank),
            shared_starts=tuple(starts[i] for i, shard in enumerate(shards) if not shard.per_rank),
            is_cuda=any(tensors[name].is_cuda for name in (*shard_names, *witnesses)),
            witnesses=tuple(witnesses),
            calm_witnesses=frozenset(i for i, name in others.items() if name in owned),
            witness_sizes=tuple(sizes.values()),
            places=placed,
        )

    def live(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that may be copied, by index: views of those that hold more than that."""
        found = [tensors[name] for name in self.live_names]
        for index, place in self.places.items():
            found[index] = found[index][place.slices]
        return found

    def position(self, index: int) -> tuple[int, int]:
        """Return the offset in the arena and the size of a tensor in the plan."""
        shard = self.shards[index]
        return self.starts[index] + (self.frozen_at if shard.frozen else 0), shard.num_bytes

    def views(self, arena: Arena) -> list[torch.Tensor]:
        """Return this plan's tensors inside `arena`, contiguous, in the order of `shards`.

        They are cached per arena.
        """
        if self.number not in arena.views:
            arena.views.clear()  # only one plan lives at a time
            for at, file in ((0, self.file), (self.frozen_at, self.frozen_file)):
                if file is not None:
                    header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
                    arena.bytes[at : at + len(header)].copy_(header)
            places = ((shard, *self.position(index)) for index, shard in enumerate(self.shards))
            arena.views[self.number] = [
                arena.bytes[at : at + num_bytes].view(torch_dtype(shard.dtype)).view(shard.sizes)
                for shard, at, num_bytes in places
            ]
        return arena.views[self.number]

    def preparation(self) -> Callable[[Arena], None]:
        """Return a function for a new thread: it prepares an arena for this plan."""
        device = torch.cuda.current_device() if self.is_cuda else None  # a new thread would use the first one

        def prepare(arena: Arena) -> None:
            if device is not None:
                with torch.cuda.device(device):
                    arena.pin()
            self.views(arena)

        return prepare


def _aligned(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to
