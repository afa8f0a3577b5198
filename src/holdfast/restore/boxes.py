"""Regions of row-major tensors as runs of bytes; pure."""

from __future__ import annotations

from collections.abc import Iterator

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
