"""Slices of tensors: verified bytes in order, with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import Struct

from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Region, Shard, byte_ranges, item_offset
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import FileRead, Want, read

SLICE_BYTES = 32 << 20
"""Bytes in memory at once: large enough for several parallel reads."""


def split_into_slices(shape: tuple[int, ...], item_bytes: int, limit_bytes: int) -> Iterator[Region]:
    """Yield regions of at most `limit_bytes` that cover a tensor in row-major order.

    Each has at least one element. It is one element long in some first dimensions, a range of the next one,
    and all of the others. So it is contiguous in the tensor, and its overlap with any other region is
    contiguous in that region.
    """
    if 0 in shape:
        return
    dim = 0  # the first dimension of which a single index fits
    while dim < len(shape) and math.prod(shape[dim + 1 :]) * item_bytes > limit_bytes:
        dim += 1
    if dim >= len(shape):
        yield Region((), ())
        return
    rest = shape[dim + 1 :]
    step = max(limit_bytes // (math.prod(rest) * item_bytes), 1)
    for number in range(math.prod(shape[:dim])):
        first = []
        for size in reversed(shape[:dim]):
            number, index = divmod(number, size)
            first.append(index)
        for start in range(0, shape[dim], step):
            offsets = (*reversed(first), start, *(0 for _ in rest))
            yield Region(offsets, (*(1 for _ in first), min(step, shape[dim] - start), *rest))


class TensorSlice(Struct, frozen=True):
    """Slice of a tensor: contiguous bytes, from byte `start` on. `view` is valid until the next slice."""

    name: str
    start: int
    view: memoryview


def copy_part(room: memoryview, inside: Shard, offset: int, view: memoryview) -> None:
    """Copy bytes of a part of a tensor, from byte `offset` of the part on, into the tensor's bytes."""
    for start, at, num_bytes in byte_ranges(inside, offset, offset + len(view)):
        room[at : at + num_bytes] = view[start - offset : start - offset + num_bytes]


def read_slices(
    parts: Parts, wanted: Sequence[str], rank: int, *, slice_bytes: int = SLICE_BYTES, num_threads: int = 4
) -> Iterator[TensorSlice]:
    """Yield all bytes of tensors in the given order, each from first to last.

    Memory: `slice_bytes`, and the buffers of `read`. A chunk that two slices share is read and hashed twice.

    Args:
        wanted: names of tensors, without aliases; those that `rank` did not save are left out. A tensor
            without elements has no slice.
    """
    for batch in _batches(parts, wanted, rank, memoryview(bytearray(slice_bytes))):
        wants_of: dict[tuple[int, bool], list[Want]] = {}
        for one, region in batch:
            for key, want in _wants(parts, one.name, rank, region, one.view):
                wants_of.setdefault(key, []).append(want)
        jobs = [
            FileRead(parts.part(owner), wants, frozen) for (owner, frozen), wants in sorted(wants_of.items())
        ]
        read(parts.store, jobs, num_threads=num_threads)
        yield from (one for one, _ in batch)


def _batches(
    parts: Parts, wanted: Sequence[str], rank: int, room: memoryview
) -> Iterator[list[tuple[TensorSlice, Region]]]:
    """Yield slices that are read together, as many as fit into `room`, each with its region."""
    batch: list[tuple[TensorSlice, Region]] = []
    filled = 0
    for name in wanted:
        saved = parts.shape_of(name, rank)
        if saved is None:
            continue
        dtype, shape = saved
        start = 0
        for region in split_into_slices(shape, ITEM_BYTES[dtype], len(room)):
            num_bytes = region.num_items * ITEM_BYTES[dtype]
            if filled + num_bytes > len(room):
                yield batch
                batch, filled = [], 0
            batch.append((TensorSlice(name, start, room[filled : filled + num_bytes]), region))
            filled += num_bytes
            start += num_bytes
    if batch:
        yield batch


def _wants(
    parts: Parts, name: str, rank: int, region: Region, room: memoryview
) -> Iterator[tuple[tuple[int, bool], Want]]:
    """Yield the requests of one slice, each with its file: the saved rank, and whether it is frozen."""
    for found in parts.shards_of(name, rank, region):
        common = region.overlap(found.shard.region)
        assert common is not None, (region, found)
        dtype = found.shard.dtype
        offsets = tuple(map(int.__sub__, common.offsets, region.offsets))
        inside = Shard(name, dtype, region.sizes, offsets, common.sizes)
        start = found.start + item_offset(common, found.shard.region) * ITEM_BYTES[dtype]
        yield (
            (found.rank, found.shard.frozen),
            Want(start, inside.num_bytes, partial(copy_part, room, inside)),
        )
