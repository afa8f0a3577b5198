"""Contiguous byte ranges of regions of row-major tensors; pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Shard
from holdfast.checkpoint.format.partitioning import Region


def range_bytes(shard: Shard) -> int:
    """Return the length of each contiguous byte range of a shard in the whole tensor."""
    items = 1
    for length, size in zip(reversed(shard.sizes), reversed(shard.shape), strict=True):
        items *= length
        if length != size:
            break
    return items * ITEM_BYTES[shard.dtype]


def range_start(shard: Shard, offset: int) -> int:
    """Return the byte in the whole tensor of byte `offset` of a non-empty shard."""
    item, rest = divmod(offset, ITEM_BYTES[shard.dtype])
    start, stride = 0, 1
    for at, length, size in zip(
        reversed(shard.offsets), reversed(shard.sizes), reversed(shard.shape), strict=True
    ):
        item, index = divmod(item, length)
        start += (at + index) * stride
        stride *= size
    return start * ITEM_BYTES[shard.dtype] + rest


def byte_ranges(shard: Shard, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous ranges of bytes `start` to `stop` of a shard.

    Each is (byte in the shard, byte in the whole tensor, length).
    """
    step = range_bytes(shard)
    while start < stop:
        end = min(start - start % step + step, stop)
        yield start, range_start(shard, start), end - start
        start = end


def is_contiguous(inner: Region, outer: Region) -> bool:
    """Return True if `inner` is contiguous in the row-major order of `outer`."""
    dims = zip(inner.sizes, outer.sizes, strict=True)
    rest = itertools.dropwhile(lambda sides: sides[0] == 1, dims)
    return all(mine == theirs for mine, theirs in itertools.islice(rest, 1, None))


def item_offset(inner: Region, outer: Region) -> int:
    """Return the index in `outer`, in row-major order, of the first element of `inner`."""
    offset = 0
    for at, start, length in zip(inner.offsets, outer.offsets, outer.sizes, strict=True):
        offset = offset * length + at - start
    return offset


def contiguous_cover(inner: Region, outer: Region) -> Region:
    """Return the smallest region around a non-empty `inner` that is contiguous in `outer`."""
    if is_contiguous(inner, outer):
        return inner
    dim = next(dim for dim, length in enumerate(inner.sizes) if length > 1) + 1
    return Region(inner.offsets[:dim] + outer.offsets[dim:], inner.sizes[:dim] + outer.sizes[dim:])
