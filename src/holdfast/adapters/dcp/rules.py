"""Partitioning of a tensor, derived from the regions that ranks write; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from holdfast.checkpoint.format.partitioning import EvenPartitioning, ListedPartitioning, Partitioning, Region


class _Even(NamedTuple):
    """Splits of a rule, and the regions' indices in the order of its ranks."""

    splits: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


class _Cell(NamedTuple):
    """Region of a tensor, and the indices of the regions that begin in it."""

    region: Region
    inside: tuple[int, ...]

    def starts(self, regions: tuple[Region, ...], dim: int) -> set[int]:
        """Return the offsets of its regions in one dimension."""
        return {regions[index].offsets[dim] for index in self.inside}


def find_rule(shape: tuple[int, ...], rows: Sequence[tuple[int, Region]]) -> Partitioning:
    """Return the partitioning of a tensor, by a rule if possible. Tensors that share a rule cost less.

    Args:
        rows: (rank, region) pairs, at least one.
    """
    rows = sorted(rows, key=lambda row: (row[1], row[0]))
    even = _even(shape, tuple(region for _, region in rows))
    if even is None or len({rank for rank, _ in rows}) < len(rows):  # a rule has one region for each rank
        return ListedPartitioning(tuple(rows))
    return EvenPartitioning(even.splits, tuple(rows[index][0] for index in even.order))


@lru_cache(maxsize=64)  # hundreds of layers have tensors of the same few shapes
def _even(shape: tuple[int, ...], regions: tuple[Region, ...]) -> _Even | None:
    if not all(region.is_inside(shape) for region in regions):
        return None
    return _split([_Cell(Region.whole(shape), tuple(range(len(regions))))], regions)


def _split(cells: Sequence[_Cell], regions: tuple[Region, ...]) -> _Even | None:
    """Return the splits that divide every cell into its regions, or None."""
    first, *others = cells
    if len(first.inside) == 1:
        is_whole = all(len(one.inside) == 1 and regions[one.inside[0]] == one.region for one in cells)
        return _Even((), tuple(one.inside[0] for one in cells)) if is_whole else None
    for dim, parts in _first_splits(first, regions):
        if all(_may_split(one, dim, parts, one.starts(regions, dim)) for one in others):
            chunks = [chunk for one in cells for chunk in _chunks(one, regions, dim, parts)]
            found = _split(chunks, regions)
            if found is not None:
                return _Even(((dim, parts), *found.splits), found.order)
    return None


def _first_splits(cell: _Cell, regions: tuple[Region, ...]) -> Iterator[tuple[int, int]]:
    """Yield each (dim, parts) that may be the first split, most parts first."""
    for dim in range(len(cell.region.sizes)):
        starts = cell.starts(regions, dim)
        for parts in range(len(starts), 1, -1):  # one split into many rather than many into few
            if _may_split(cell, dim, parts, starts):
                yield dim, parts


def _may_split(cell: _Cell, dim: int, parts: int, starts: set[int]) -> bool:
    """Return True if a cell may be split this way.

    Each of the parts needs a region that begins in it, and equally many regions.
    """
    start, length = cell.region.offsets[dim], cell.region.sizes[dim]
    edges = range(start, start + length, -(-length // parts)) if length else ()
    return len(cell.inside) % parts == 0 and len(edges) == parts and starts.issuperset(edges)


def _chunks(cell: _Cell, regions: tuple[Region, ...], dim: int, parts: int) -> Iterator[_Cell]:
    """Yield each part of a split cell, with the regions that begin in it."""
    region = cell.region
    size = -(-region.sizes[dim] // parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in cell.inside:
        members[(regions[index].offsets[dim] - region.offsets[dim]) // size].append(index)
    partitioning = EvenPartitioning(((dim, parts),), tuple(range(parts)))
    for number, chunk in partitioning.regions(region.sizes):
        at = tuple(a + b for a, b in zip(region.offsets, chunk.offsets, strict=True))
        yield _Cell(Region(at, chunk.sizes), tuple(members[number]))
