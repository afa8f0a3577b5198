"""Cuts of tensors into boxes, and the rank that wrote each; pure, so that all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """A region of a tensor, given by `offsets` and `lengths`, one number per dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_items(self) -> int:
        """Number of elements; 1 for the box of a tensor without dimensions."""
        return math.prod(self.lengths)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        mine = (start + length for start, length in zip(*self, strict=True))
        theirs = (start + length for start, length in zip(*other, strict=True))
        lengths = tuple(min(a, b) - start for a, b, start in zip(mine, theirs, offsets, strict=True))
        return Box(offsets, lengths) if all(length > 0 for length in lengths) else None

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Return True if this can be a box of a tensor of this shape."""
        if not len(self.offsets) == len(self.lengths) == len(shape):
            return False
        sides = zip(self.offsets, self.lengths, shape, strict=True)
        return all(0 <= start <= start + length <= size for start, length, size in sides)


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor cut evenly: by each of `splits` in turn, every box so far is cut along `dim` into `parts`.

    To cut n elements into p parts, each part but the last takes ceil(n / p), as long as any are left; so the
    last parts may be shorter, or empty. A tensor that one rank wrote whole is a cut without splits.

    Source: this is the rule of `torch.chunk`, by which DTensor shards, with the empty parts made explicit.
    Shards that are strided over a mesh (FSDP over tensor parallel) are the same splits in another order.

    Args:
        splits: (dim, parts) in the order in which they are made.
        ranks: the rank that wrote each box, the index of the first split varying slowest.
    """

    splits: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    def box_of(self, rank: int, shape: tuple[int, ...]) -> Box | None:
        """Return the box that a rank wrote, perhaps empty, or None if it wrote none."""
        index = self.index_of(rank)
        return None if index is None else self.box_at(index, shape)

    def index_of(self, rank: int) -> int | None:
        """Return the number of the box that a rank wrote, or None without one."""
        if not self.splits:
            return 0 if rank == self.ranks[0] else None
        return self.ranks.index(rank) if rank in self.ranks else None

    def box_at(self, index: int, shape: tuple[int, ...]) -> Box:
        """Return the box with number `index`, in the order of `ranks`."""
        offsets, lengths = [0] * len(shape), list(shape)
        stride = math.prod(parts for _, parts in self.splits)
        for dim, parts in self.splits:
            stride //= parts
            which, index = divmod(index, stride)
            size = -(-lengths[dim] // parts)
            start = min(which * size, lengths[dim])
            offsets[dim] += start
            lengths[dim] = min(size, lengths[dim] - start)
        return Box(tuple(offsets), tuple(lengths))

    def boxes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yield every (rank, box), including empty ones."""
        return ((rank, self.box_at(i, shape)) for i, rank in enumerate(self.ranks))

    def touching(self, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yield each (rank, box) that shares elements with `box`. The cost grows only with the result."""
        if self.splits:
            yield from self._touching(box, Box.whole(shape), 0, 0)
        elif box.num_items:
            yield self.ranks[0], Box.whole(shape)

    def _touching(self, wanted: Box, inside: Box, split: int, index: int) -> Iterator[tuple[int, Box]]:
        if split == len(self.splits):
            if wanted.overlap(inside):
                yield self.ranks[index], inside
            return
        dim, parts = self.splits[split]
        start, length = inside.offsets[dim], inside.lengths[dim]
        size = -(-length // parts)
        low = max(wanted.offsets[dim], start)
        high = min(wanted.offsets[dim] + wanted.lengths[dim], start + length)
        if low >= high:
            return
        for which in range((low - start) // size, (high - start - 1) // size + 1):
            offsets, lengths = list(inside.offsets), list(inside.lengths)
            offsets[dim] = start + which * size
            lengths[dim] = min(size, length - which * size)
            one = Box(tuple(offsets), tuple(lengths))
            yield from self._touching(wanted, one, split + 1, index * parts + which)


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tensor cut by no rule: each box is listed with the rank that wrote it."""

    rows: tuple[tuple[int, Box], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that wrote each box."""
        return tuple(rank for rank, _ in self.rows)

    def box_of(self, rank: int, shape: tuple[int, ...]) -> Box | None:
        """Return the box that a rank wrote, or None if it wrote none."""
        return next((box for one, box in self.rows if one == rank), None)

    def index_of(self, rank: int) -> int | None:
        """Return the number of the first box that a rank wrote; None if it wrote none."""
        return next((index for index, (one, _) in enumerate(self.rows) if one == rank), None)

    def box_at(self, index: int, shape: tuple[int, ...]) -> Box:
        """Return the box number `index`."""
        return self.rows[index][1]

    def boxes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Every (rank, box)."""
        return iter(self.rows)

    def touching(self, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yield each (rank, box) that shares elements with `box`."""
        return ((rank, one) for rank, one in self.rows if box.overlap(one))


AnyCut = Cut | Boxes


def whole(rank: int) -> Cut:
    """Return the cut of a tensor that one rank wrote whole."""
    return Cut((), (rank,))
