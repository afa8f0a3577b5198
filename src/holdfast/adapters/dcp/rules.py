"""The rule by which a tensor was cut, found from the boxes that ranks are to write; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from holdfast.format.cuts import AnyCut, Box, Boxes, Cut


class _Even(NamedTuple):
    """An even cut: its splits, and the boxes' indices in the order of `Cut.ranks`."""

    splits: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


def rule_of(shape: tuple[int, ...], rows: Sequence[tuple[int, Box]]) -> AnyCut:
    """How a tensor is cut: as a rule if there is one, which costs the less the more tensors share it.

    Args:
        shape: of the tensor.
        rows: (rank, box), at least one.
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
    return _split(Box.whole(shape), boxes, tuple(range(len(boxes))))


def _split(region: Box, boxes: tuple[Box, ...], inside: tuple[int, ...]) -> _Even | None:
    """The splits that cut `region` into the boxes numbered `inside`; None if there are none."""
    if len(inside) == 1:
        return _Even((), inside) if boxes[inside[0]] == region else None
    for dim, parts in _first_splits(region, boxes, inside):
        chunks = _chunks(region, boxes, inside, dim, parts)
        found = _alike(_split(chunk, boxes, members) for chunk, members in chunks)
        if found is not None:
            return _Even(((dim, parts), *found.splits), found.order)
    return None


def _first_splits(region: Box, boxes: tuple[Box, ...], inside: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(dim, parts) that may come first: the parts are alike, and a box begins at each of them."""
    for dim, length in enumerate(region.lengths):
        starts = {boxes[index].offsets[dim] for index in inside}
        for parts in range(len(starts), 1, -1):  # one split into many rather than many into few
            size = -(-length // parts)
            edges = range(region.offsets[dim], region.offsets[dim] + length, size) if length else ()
            if len(inside) % parts == 0 and len(edges) == parts and starts.issuperset(edges):
                yield dim, parts


def _chunks(
    region: Box, boxes: tuple[Box, ...], inside: tuple[int, ...], dim: int, parts: int
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Each part of a region that is split, and the numbers of the boxes that begin in it."""
    size = -(-region.lengths[dim] // parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in inside:
        members[(boxes[index].offsets[dim] - region.offsets[dim]) // size].append(index)
    cut = Cut(((dim, parts),), tuple(range(parts)))
    for which, chunk in cut.boxes(region.lengths):
        at = tuple(a + b for a, b in zip(region.offsets, chunk.offsets, strict=True))
        yield Box(at, chunk.lengths), tuple(members[which])


def _alike(found: Iterator[_Even | None]) -> _Even | None:
    """The splits that all parts have in common, and their boxes one part after the other."""
    splits: tuple[tuple[int, int], ...] | None = None
    order: list[int] = []
    for one in found:
        if one is None or splits not in (None, one.splits):
            return None
        splits = one.splits
        order += one.order
    assert splits is not None
    return _Even(splits, tuple(order))
