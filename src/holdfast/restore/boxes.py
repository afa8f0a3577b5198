"""Regions of row-major tensors as runs of bytes; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from holdfast.format.cuts import Box
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.layout import Piece


def run_bytes(piece: Piece) -> int:
    """Return the length in bytes of a piece's runs in the whole tensor; its own if it is one run."""
    items = 1
    for length, size in zip(reversed(piece.lengths), reversed(piece.shape), strict=True):
        items *= length
        if length != size:
            break
    return items * ITEM_BYTES[piece.dtype]


def run_start(piece: Piece, offset: int) -> int:
    """Return the byte in the whole tensor of byte `offset` of a non-empty piece."""
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
    """Yield the runs in bytes `start` to `stop` of a piece.

    Each is (byte in the piece, byte in the whole tensor, length).
    """
    step = run_bytes(piece)
    while start < stop:
        end = min(start - start % step + step, stop)
        yield start, run_start(piece, start), end - start
        start = end


def is_run(inner: Box, outer: Box) -> bool:
    """Return True if `inner` is one contiguous run in the row-major order of `outer`."""
    dims = zip(inner.lengths, outer.lengths, strict=True)
    rest = itertools.dropwhile(lambda sides: sides[0] == 1, dims)
    return all(mine == theirs for mine, theirs in itertools.islice(rest, 1, None))


def item_offset(inner: Box, outer: Box) -> int:
    """Return the index in `outer`, in row-major order, of the first element of `inner`."""
    offset = 0
    for at, start, length in zip(inner.offsets, outer.offsets, outer.lengths, strict=True):
        offset = offset * length + at - start
    return offset


def covering_run(inner: Box, outer: Box) -> Box:
    """Return the smallest box around a non-empty `inner` that is one run of `outer`."""
    if is_run(inner, outer):
        return inner
    cut = next(dim for dim, length in enumerate(inner.lengths) if length > 1) + 1
    return Box(inner.offsets[:cut] + outer.offsets[cut:], inner.lengths[:cut] + outer.lengths[cut:])
