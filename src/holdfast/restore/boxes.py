"""Regions of row-major tensors as runs of bytes; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from holdfast.format.cuts import Box
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.layout import Piece


def run_bytes(piece: Piece) -> int:
    """Length in bytes of the runs that a piece makes in its whole tensor; all of it if it is a single run."""
    items = 1
    for length, size in zip(reversed(piece.lengths), reversed(piece.shape), strict=True):
        items *= length
        if length != size:
            break
    return items * ITEM_BYTES[piece.dtype]


def run_start(piece: Piece, offset: int) -> int:
    """Byte in the whole tensor of byte `offset` of a piece that is not empty."""
    item, rest = divmod(offset, ITEM_BYTES[piece.dtype])
    start, stride = 0, 1
    for at, length, size in zip(
        reversed(piece.offsets), reversed(piece.lengths), reversed(piece.shape), strict=True
    ):
        item, index = divmod(item, length)
        start += (at + index) * stride
        stride *= size
    return start * ITEM_BYTES[piece.dtype] + rest


def runs(piece: Piece, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Runs in bytes `start` to `stop` of a piece: (byte in the piece, byte in the whole tensor, length)."""
    step = run_bytes(piece)
    while start < stop:
        end = min(start - start % step + step, stop)
        yield start, run_start(piece, start), end - start
        start = end


def is_run(inner: Box, outer: Box) -> bool:
    """True if the elements of a box follow each other in the row-major order of one around it."""
    dims = zip(inner.lengths, outer.lengths, strict=True)
    rest = itertools.dropwhile(lambda sides: sides[0] == 1, dims)
    return all(mine == theirs for mine, theirs in itertools.islice(rest, 1, None))


def item_offset(inner: Box, outer: Box) -> int:
    """Which element of a box, in row-major order, is the first of one inside it."""
    offset = 0
    for at, start, length in zip(inner.offsets, outer.offsets, outer.lengths, strict=True):
        offset = offset * length + at - start
    return offset


def covering_run(inner: Box, outer: Box) -> Box:
    """The smallest box around `inner` that is whole rows of `outer`, and so a run of it."""
    if is_run(inner, outer):
        return inner
    cut = next(dim for dim, length in enumerate(outer.lengths) if length > 1)
    return Box(
        (*outer.offsets[:cut], inner.offsets[cut], *outer.offsets[cut + 1 :]),
        (*outer.lengths[:cut], inner.lengths[cut], *outer.lengths[cut + 1 :]),
    )
