"""Partitioning of a tensor into regions, and the rank that wrote each; pure, so that all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Region(NamedTuple):
    """Rectangular part of a tensor: `offsets` and `sizes`, one number of each per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the region of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_items(self) -> int:
        """Number of elements; 1 in a tensor without dimensions."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of a tensor that returns the region of it."""
        return tuple(slice(start, start + length) for start, length in zip(*self, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection of two regions of one tensor, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        mine = (start + length for start, length in zip(*self, strict=True))
        theirs = (start + length for start, length in zip(*other, strict=True))
        sizes = tuple(min(a, b) - start for a, b, start in zip(mine, theirs, offsets, strict=True))
        return Region(offsets, sizes) if all(length > 0 for length in sizes) else None

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Return True if this can be a region of a tensor of this shape."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        sides = zip(self.offsets, self.sizes, shape, strict=True)
        return all(0 <= start <= start + length <= size for start, length, size in sides)


@dataclass(frozen=True, slots=True)
class EvenPartitioning:
    """Partitioning by a rule: each split divides every region so far along `dim` into `parts`.

    Of n elements, each of p parts gets ceil(n / p), as long as any are left. So the last parts may be
    shorter, or empty. A tensor that one rank wrote whole has no splits.

    Source: this is the rule of `torch.chunk`, by which DTensor shards, with the empty parts made explicit.
    Shards that are strided over a mesh (FSDP over tensor parallel) are the same splits in another order.
    """

    splits: tuple[tuple[int, int], ...]  # (dim, parts) in the order in which they are made
    ranks: tuple[int, ...]  # the writer of each region, the index of the first split varying slowest

    def indices_of(self, rank: int) -> tuple[int, ...]:
        """Return the number of the region that a rank wrote, if it wrote one."""
        if not self.splits:
            return (0,) if rank == self.ranks[0] else ()
        return (self.ranks.index(rank),) if rank in self.ranks else ()

    def region_at(self, index: int, shape: tuple[int, ...]) -> Region:
        """Return the region with number `index`, in the order of `ranks`."""
        offsets, sizes = [0] * len(shape), list(shape)
        stride = math.prod(parts for _, parts in self.splits)
        for dim, parts in self.splits:
            stride //= parts
            which, index = divmod(index, stride)
            size = -(-sizes[dim] // parts)
            start = min(which * size, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(size, sizes[dim] - start)
        return Region(tuple(offsets), tuple(sizes))

    def regions(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield every (rank, region), including empty ones."""
        return ((rank, self.region_at(i, shape)) for i, rank in enumerate(self.ranks))

    def touching(self, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield each (rank, region) that overlaps `region`. The cost grows only with the result."""
        if self.splits:
            yield from self._touching(region, Region.whole(shape), 0, 0)
        elif region.num_items:
            yield self.ranks[0], Region.whole(shape)

    def _touching(
        self, wanted: Region, inside: Region, split: int, index: int
    ) -> Iterator[tuple[int, Region]]:
        if split == len(self.splits):
            if wanted.overlap(inside):
                yield self.ranks[index], inside
            return
        dim, parts = self.splits[split]
        start, length = inside.offsets[dim], inside.sizes[dim]
        size = -(-length // parts)
        low = max(wanted.offsets[dim], start)
        high = min(wanted.offsets[dim] + wanted.sizes[dim], start + length)
        if low >= high:
            return
        for which in range((low - start) // size, (high - start - 1) // size + 1):
            offsets, sizes = list(inside.offsets), list(inside.sizes)
            offsets[dim] = start + which * size
            sizes[dim] = min(size, length - which * size)
            one = Region(tuple(offsets), tuple(sizes))
            yield from self._touching(wanted, one, split + 1, index * parts + which)


@dataclass(frozen=True, slots=True)
class ListedPartitioning:
    """Partitioning without a rule: each region is listed with the rank that wrote it.

    A rank may have written several regions.
    """

    rows: tuple[tuple[int, Region], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that wrote each region."""
        return tuple(rank for rank, _ in self.rows)

    def indices_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the regions that a rank wrote."""
        return tuple(index for index, (one, _) in enumerate(self.rows) if one == rank)

    def region_at(self, index: int, shape: tuple[int, ...]) -> Region:
        """Return the region number `index`."""
        return self.rows[index][1]

    def regions(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Every (rank, region)."""
        return iter(self.rows)

    def touching(self, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield each (rank, region) that overlaps `region`."""
        return ((rank, one) for rank, one in self.rows if region.overlap(one))


Partitioning = EvenPartitioning | ListedPartitioning


def whole(rank: int) -> EvenPartitioning:
    """Return the partitioning of a tensor that one rank wrote whole."""
    return EvenPartitioning((), (rank,))


@dataclass(frozen=True, slots=True)
class FillTarget:
    """Destination of a saved tensor's bytes."""

    tensor: torch.Tensor  # contiguous, of the saved dtype, and of the region's sizes
    region: Region | None = None  # its region of the saved tensor; None for all of it
