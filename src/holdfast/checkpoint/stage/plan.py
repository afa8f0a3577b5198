"""Save plan: the tensors that this rank writes, and their positions in its files, kept by structure."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping

import torch

from holdfast.checkpoint.format.catalog import Catalog, catalog_text
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.layout import Region, Shard, lay_out
from holdfast.checkpoint.stage.arena import Arena
from holdfast.checkpoint.stage.watch import LARGE_BYTES
from holdfast.checkpoint.state import CapturedState
from holdfast.checkpoint.state.tensors import NAMES, torch_dtype

WITNESS_ALIGNMENT = 64
"""Bytes that the offset of each witness in the arena is a multiple of."""


class SavePlan:
    """Files of one rank, valid while the structure of the state stays the same.

    An arena holds the image of the data file and, from the next whole page on, that of the file of frozen
    tensors, if there are any. Numbers of tensors are their indices in `live_names`.

    Args:
        captured: the state, with this rank's tensors or its regions of them.
        catalog: the tensors that this rank holds, without its own ones.
        witnesses: names of tensors that are not written, but copied at some saves to be hashed.
        witness_bytes: most bytes of the witnesses of one save, each from `WITNESS_ALIGNMENT` on.
    """

    def __init__(
        self,
        captured: CapturedState,
        catalog: Catalog,
        rank: int,
        witnesses: Collection[str] = (),
        witness_bytes: int = 0,
    ) -> None:
        tensors, structure = captured.tensors, captured.structure
        owned, places = structure.owned, structure.places
        shards = list(catalog.shards_of(rank))
        shards += [
            Shard.whole(name, NAMES[tensor.dtype], tuple(tensor.shape), per_rank=True)
            for name, tensor in tensors.items()
            if name in structure.per_rank
        ]
        self.shards = tuple(shards)
        self.names = tuple(shard.name for shard in shards)  # of the tensors that this rank writes
        self.witnesses = tuple(witnesses)  # tensors that other ranks write
        self.live_names = self.names + self.witnesses  # of all tensors that may be copied
        changing = [i for i, shard in enumerate(shards) if not shard.frozen]
        self.frozen = tuple(i for i, shard in enumerate(shards) if shard.frozen)  # no optimizer trains them
        self.background = tuple(i for i in changing if self.names[i] in owned)
        others = owned | structure.temporary
        # Without an owner, in memory that lasts from save to save.
        self.lasting = tuple(i for i in changing if self.names[i] not in others)
        self.file = lay_out([shards[i] for i in changing], rank)
        self.frozen_file = lay_out([shards[i] for i in self.frozen], rank) if self.frozen else None
        starts = dict(zip(changing, self.file.starts, strict=True))
        if self.frozen_file is not None:
            starts |= zip(self.frozen, self.frozen_file.starts, strict=True)
        self.starts = tuple(starts[i] for i in range(len(shards)))  # of each shard in its file
        self.own = tuple((s.name, s.dtype, s.shape, starts[i]) for i, s in enumerate(shards) if s.per_rank)
        self.shared_starts = tuple(starts[i] for i, shard in enumerate(shards) if not shard.per_rank)

        frozen_bytes = self.frozen_file.file_bytes if self.frozen_file else 0
        self.num_bytes = self.file.file_bytes + frozen_bytes
        self.frozen_at = aligned(self.file.file_bytes, mmap.PAGESIZE)  # offset of its image in the arena
        self.image_bytes = self.frozen_at + frozen_bytes if frozen_bytes else self.file.file_bytes
        self.witness_at = aligned(self.image_bytes)  # offset of them in the arena
        self.arena_bytes = self.witness_at + witness_bytes if witness_bytes else self.image_bytes

        added = dict(enumerate(self.witnesses, len(shards)))
        regions = [(i, one.name, Region(one.offsets, one.sizes)) for i, one in enumerate(shards)]
        self.places = {i: places[name][region] for i, name, region in regions if name in places}
        self.places |= {i: next(iter(places[name].values())) for i, name in added.items() if name in places}
        self.calm_witnesses = frozenset(i for i, name in added.items() if name in owned)
        self.witness_sizes = tuple(
            self.places[i].num_items * tensors[name].itemsize if i in self.places else tensors[name].nbytes
            for i, name in added.items()
        )
        sizes = (*(shard.num_bytes for shard in shards), *self.witness_sizes)
        self.large = frozenset(i for i, num_bytes in enumerate(sizes) if num_bytes >= LARGE_BYTES)
        self.is_cuda = any(tensors[name].is_cuda for name in self.live_names)
        self.catalog = catalog_text(catalog)
        self.catalog_digest = digest(self.catalog)

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
        """Return this plan's tensors in `arena`, contiguous, in the order of `shards`; it keeps them."""
        if arena.plan is not self:
            for at, file in ((0, self.file), (self.frozen_at, self.frozen_file)):
                if file is not None:
                    header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
                    arena.bytes[at : at + len(header)].copy_(header)
            places = ((shard, *self.position(index)) for index, shard in enumerate(self.shards))
            arena.views = [
                arena.bytes[at : at + num_bytes].view(torch_dtype(shard.dtype)).view(shard.sizes)
                for shard, at, num_bytes in places
            ]
            arena.plan = self
        return arena.views

    def preparation(self) -> Callable[[Arena], None]:
        """Return a function for a new thread: it prepares an arena for this plan."""
        device = torch.cuda.current_device() if self.is_cuda else None  # a new thread would use the first one

        def prepare(arena: Arena) -> None:
            if device is not None:
                with torch.cuda.device(device):
                    arena.pin()
            self.views(arena)

        return prepare


def aligned(num_bytes: int, to: int = WITNESS_ALIGNMENT) -> int:
    """Return the next multiple of an alignment, by default of that of witnesses."""
    return -(-num_bytes // to) * to
