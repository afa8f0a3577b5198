"""Cut rule of a tensor, found from the boxes that ranks write; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from holdfast.format.cuts import AnyCut, Box, Boxes, Cut


class _Even(NamedTuple):
    """Even cut: its splits, and the boxes' indices in the order of `Cut.ranks`."""

    splits: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


class _Region(NamedTuple):
    """Part of a tensor, and the indices of the boxes that begin in it."""

    box: Box
    inside: tuple[int, ...]

    def starts(self, boxes: tuple[Box, ...], dim: int) -> set[int]:
        """Return the offsets of its boxes in one dimension."""
        return {boxes[index].offsets[dim] for index in self.inside}


def find_rule(shape: tuple[int, ...], rows: Sequence[tuple[int, Box]]) -> AnyCut:
    """Return the cut of a tensor, as a rule if possible. Tensors that share a rule cost less.

    Args:
        shape: shape of the tensor.
        rows: (rank, box) pairs, at least one.
    """
    rows = sorted(rows, key=lambda row: (row[1], row[0]))
    even = _even(shape, tuple(box for _, box in rows))
    if even is None:
        return Boxes(tuple(rows))
    return Cut(even.splits, tuple(rows[index][0] for index in even.order))


@lru_cache(maxsize=64)  # hundreds of layers have tensors of the same few shapes
def _even(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> _Even | None:
    if not all(box.is_inside(shape) for box in boxes):
        return None
    return _split([_Region(Box.whole(shape), tuple(range(len(boxes))))], boxes)


def _split(regions: Sequence[_Region], boxes: tuple[Box, ...]) -> _Even | None:
    """Return the splits that cut every region into its boxes, or None."""
    first, *others = regions
    if len(first.inside) == 1:
        is_whole = all(len(one.inside) == 1 and boxes[one.inside[0]] == one.box for one in regions)
        return _Even((), tuple(one.inside[0] for one in regions)) if is_whole else None
    for dim, parts in _first_splits(first, boxes):
        if all(_may_split(one, dim, parts, one.starts(boxes, dim)) for one in others):
            chunks = [chunk for one in regions for chunk in _chunks(one, boxes, dim, parts)]
            found = _split(chunks, boxes)
            if found is not None:
                return _Even(((dim, parts), *found.splits), found.order)
    return None


def _first_splits(region: _Region, boxes: tuple[Box, ...]) -> Iterator[tuple[int, int]]:
    """Yield each (dim, parts) that may be the first split, most parts first."""
    for dim in range(len(region.box.lengths)):
        starts = region.starts(boxes, dim)
        for parts in range(len(starts), 1, -1):  # one split into many rather than many into few
            if _may_split(region, dim, parts, starts):
                yield dim, parts


def _may_split(region: _Region, dim: int, parts: int, starts: set[int]) -> bool:
    """Return True if a region may be split so.

    Each of the parts needs a box that begins in it, and equally many boxes.
    """
    start, length = region.box.offsets[dim], region.box.lengths[dim]
    edges = range(start, start + length, -(-length // parts)) if length else ()
    return len(region.inside) % parts == 0 and len(edges) == parts and starts.issuperset(edges)


def _chunks(region: _Region, boxes: tuple[Box, ...], dim: int, parts: int) -> Iterator[_Region]:
    """Yield each part of a split region, with the boxes that begin in it."""
    box = region.box
    size = -(-box.lengths[dim] // parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in region.inside:
        members[(boxes[index].offsets[dim] - box.offsets[dim]) // size].append(index)
    cut = Cut(((dim, parts),), tuple(range(parts)))
    for number, chunk in cut.boxes(box.lengths):
        at = tuple(a + b for a, b in zip(box.offsets, chunk.offsets, strict=True))
        yield _Region(Box(at, chunk.lengths), tuple(members[number]))
