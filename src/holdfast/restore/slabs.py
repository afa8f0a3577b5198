"""Slabs: verified bytes of any number of tensors, in order, with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.format.cuts import Box
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.layout import Piece
from holdfast.restore.boxes import item_offset, runs
from holdfast.restore.parts import Parts
from holdfast.restore.read import Job, ReadStats, Want, read
from holdfast.store.contract import Store

SLAB_BYTES = 32 << 20
"""Bytes in memory at once: large enough for several parallel reads."""


def cut_in_slabs(shape: tuple[int, ...], item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Yield boxes of at most `limit_bytes` that cover a tensor in row-major order.

    Each has at least one element. It is one element long in some first dimensions, a range of the next one,
    and all of the others. So it is one run of bytes in the tensor, and its overlap with any other box is one
    run in that box.
    """
    if 0 in shape:
        return
    dim = 0  # the first dimension of which a single index fits
    while dim < len(shape) and math.prod(shape[dim + 1 :]) * item_bytes > limit_bytes:
        dim += 1
    if dim >= len(shape):
        yield Box((), ())
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
            yield Box(offsets, (*(1 for _ in first), min(step, shape[dim] - start), *rest))


@dataclass(frozen=True, slots=True)
class Slab:
    """One run of bytes of a tensor, from byte `start` on. `view` is valid until the next slab."""

    name: str
    start: int
    view: memoryview


@dataclass(slots=True)
class _Batch:
    """Runs of bytes of tensors that are read together."""

    slabs: list[tuple[str, int, Box, int]] = field(default_factory=list)  # name, start, box, bytes
    num_bytes: int = 0


class _SlabSink:
    """Sink that writes a part of a piece to its position in a slab."""

    def __init__(self, room: memoryview, inside: Piece) -> None:
        self._room = room
        self._inside = inside

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes of the piece into the slab."""
        for start, at, num_bytes in runs(self._inside, offset, offset + len(view)):
            self._room[at : at + num_bytes] = view[start - offset : start - offset + num_bytes]


def read_slabs(
    store: Store,
    parts: Parts,
    wanted: Sequence[str],
    rank: int,
    *,
    slab_bytes: int = SLAB_BYTES,
    num_threads: int = 4,
    on_read: Callable[[ReadStats], None] | None = None,
) -> Iterator[Slab]:
    """Yield all bytes of tensors in the given order, each from first to last.

    Memory: `slab_bytes`, and the buffers of `read`. A chunk that two slabs share is read and hashed twice.

    Args:
        store: the home.
        parts: the checkpoint.
        wanted: names of tensors, without aliases; those that `rank` did not save are left out. A tensor
            without elements has no slab.
        rank: rank whose per-rank tensors are read.
        slab_bytes: bytes that are read together.
        num_threads: threads that read and hash.
        on_read: called with the statistics of each read, before its slabs are yielded.

    Raises:
        Corrupt: damage was found; the slabs before it are good.
        NotFound: a file is missing.
        RetryLater: the store failed.
    """
    room = memoryview(bytearray(slab_bytes))
    for batch in _batches(parts, wanted, rank, slab_bytes):
        wants_of: dict[tuple[int, bool], list[Want]] = {}
        at = 0
        for name, _, box, num_bytes in batch.slabs:
            for key, want in _wants(parts, name, rank, box, room[at : at + num_bytes]):
                wants_of.setdefault(key, []).append(want)
            at += num_bytes
        jobs = [Job(parts.part(owner), wants, frozen) for (owner, frozen), wants in sorted(wants_of.items())]
        stats = read(store, jobs, num_threads=num_threads)
        if on_read is not None:
            on_read(stats)
        at = 0
        for name, start, _, num_bytes in batch.slabs:
            yield Slab(name, start, room[at : at + num_bytes])
            at += num_bytes


def _batches(parts: Parts, wanted: Sequence[str], rank: int, limit_bytes: int) -> Iterator[_Batch]:
    batch = _Batch()
    for name in wanted:
        saved = parts.shape_of(name, rank)
        if saved is None:
            continue
        dtype, shape = saved
        start = 0
        for box in cut_in_slabs(shape, ITEM_BYTES[dtype], limit_bytes):
            num_bytes = box.num_items * ITEM_BYTES[dtype]
            if batch.num_bytes + num_bytes > limit_bytes:
                yield batch
                batch = _Batch()
            batch.slabs.append((name, start, box, num_bytes))
            batch.num_bytes += num_bytes
            start += num_bytes
    if batch.slabs:
        yield batch


def _wants(
    parts: Parts, name: str, rank: int, box: Box, room: memoryview
) -> Iterator[tuple[tuple[int, bool], Want]]:
    """Yield the requests of one slab, each with its file: the saved rank, and whether it is frozen."""
    for found in parts.pieces_of(name, rank, box):
        common = box.overlap(found.box)
        assert common is not None, (box, found)
        dtype = found.piece.dtype
        offsets = tuple(map(int.__sub__, common.offsets, box.offsets))
        inside = Piece(name, dtype, box.lengths, offsets, common.lengths)
        start = found.start + item_offset(common, found.box) * ITEM_BYTES[dtype]
        yield (found.rank, found.piece.frozen), Want(start, inside.num_bytes, _SlabSink(room, inside))
