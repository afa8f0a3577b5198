"""Layout of tensors: their regions and writers, and the shards in a data file of safetensors; pure."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.limits import MAX_DIMS, MAX_RANKS, MAX_SPLITS, Rank
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import decode_as, is_text

if TYPE_CHECKING:
    import torch


class Region(NamedTuple):
    """Rectangular part of a tensor: `offsets` and `sizes`, one number of each per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the region of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_items(self) -> int:
        """Number of elements; 1 in a tensor without dimensions."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of a tensor that returns the region of it."""
        return tuple(slice(start, start + length) for start, length in zip(*self, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection of two regions of one tensor, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        mine = (start + length for start, length in zip(*self, strict=True))
        theirs = (start + length for start, length in zip(*other, strict=True))
        sizes = tuple(min(a, b) - start for a, b, start in zip(mine, theirs, offsets, strict=True))
        return Region(offsets, sizes) if all(length > 0 for length in sizes) else None

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Return True if this can be a region of a tensor of this shape."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        sides = zip(self.offsets, self.sizes, shape, strict=True)
        return all(0 <= start <= start + length <= size for start, length, size in sides)


_Dim = Annotated[int, Meta(ge=0, lt=MAX_DIMS)]
_NumParts = Annotated[int, Meta(ge=1, le=MAX_RANKS)]


class EvenPartitioning(Struct, frozen=True):
    """Partitioning by a rule: each split divides every region so far along `dim` into `parts`.

    Of n elements, each of p parts gets ceil(n / p), as long as any are left. So the last parts may be
    shorter, or empty. A tensor that one rank wrote whole has no splits.

    Source: this is the rule of `torch.chunk`, by which DTensor shards, with the empty parts made explicit.
    Shards that are strided over a mesh (FSDP over tensor parallel) are the same splits in another order.
    """

    # Dimension and number of parts of each split, in the order in which they are made.
    splits: Annotated[tuple[tuple[_Dim, _NumParts], ...], Meta(max_length=MAX_SPLITS)]
    # The writer of each region, the index of the first split varying slowest.
    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1)]

    def indices_of(self, rank: int) -> tuple[int, ...]:
        """Return the number of the region that a rank wrote, if it wrote one."""
        if not self.splits:
            return (0,) if rank == self.ranks[0] else ()
        return (self.ranks.index(rank),) if rank in self.ranks else ()

    def region_at(self, index: int, shape: tuple[int, ...]) -> Region:
        """Return the region with number `index`, in the order of `ranks`."""
        offsets, sizes = [0] * len(shape), list(shape)
        stride = math.prod(parts for _, parts in self.splits)
        for dim, parts in self.splits:
            stride //= parts
            which, index = divmod(index, stride)
            size = -(-sizes[dim] // parts)
            start = min(which * size, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(size, sizes[dim] - start)
        return Region(tuple(offsets), tuple(sizes))

    def regions(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield every (rank, region), including empty ones."""
        return ((rank, self.region_at(i, shape)) for i, rank in enumerate(self.ranks))

    def touching(self, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield each (rank, region) that overlaps `region`. The cost grows only with the result."""
        if self.splits:
            yield from self._touching(region, Region.whole(shape), 0, 0)
        elif region.num_items:
            yield self.ranks[0], Region.whole(shape)

    def _touching(
        self, wanted: Region, inside: Region, split: int, index: int
    ) -> Iterator[tuple[int, Region]]:
        if split == len(self.splits):
            if wanted.overlap(inside):
                yield self.ranks[index], inside
            return
        dim, parts = self.splits[split]
        start, length = inside.offsets[dim], inside.sizes[dim]
        size = -(-length // parts)
        low = max(wanted.offsets[dim], start)
        high = min(wanted.offsets[dim] + wanted.sizes[dim], start + length)
        if low >= high:
            return
        for which in range((low - start) // size, (high - start - 1) // size + 1):
            offsets, sizes = list(inside.offsets), list(inside.sizes)
            offsets[dim] = start + which * size
            sizes[dim] = min(size, length - which * size)
            part = Region(tuple(offsets), tuple(sizes))
            yield from self._touching(wanted, part, split + 1, index * parts + which)


class ListedPartitioning(Struct, frozen=True):
    """Partitioning without a rule: each region is listed with the rank that wrote it.

    A rank may have written several regions.
    """

    rows: tuple[tuple[int, Region], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that wrote each region."""
        return tuple(rank for rank, _ in self.rows)

    def indices_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the regions that a rank wrote."""
        return tuple(index for index, (one, _) in enumerate(self.rows) if one == rank)

    def region_at(self, index: int, shape: tuple[int, ...]) -> Region:
        """Return the region number `index`."""
        return self.rows[index][1]

    def regions(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Every (rank, region)."""
        return iter(self.rows)

    def touching(self, region: Region, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield each (rank, region) that overlaps `region`."""
        return ((rank, one) for rank, one in self.rows if region.overlap(one))


Partitioning = EvenPartitioning | ListedPartitioning


def whole(rank: int) -> EvenPartitioning:
    """Return the partitioning of a tensor that one rank wrote whole."""
    return EvenPartitioning((), (rank,))


class FillTarget(Struct, frozen=True):
    """Destination of a saved tensor's bytes."""

    tensor: torch.Tensor  # contiguous, of the saved dtype, and of the region's sizes
    region: Region | None = None  # its region of the saved tensor; None for all of it


BLOCK_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # safetensors readers refuse more
_RESERVED = re.compile(r"@r[0-9]+\Z")


class Shard(Struct, frozen=True):
    """A rank's part of a tensor.

    `offsets` and `sizes` - its region of the global `shape`. `dtype` - a safetensors name. `per_rank` -
    every rank has its own tensor (RNG state, a data loader's buffer). `frozen` - no optimizer trains it, so
    it is in the second data file. `number` - its position among the rank's shards of this tensor, from 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    per_rank: bool = False
    frozen: bool = False
    number: int = 0

    @classmethod
    def whole(cls, name: str, dtype: str, shape: tuple[int, ...], *, per_rank: bool = False) -> Shard:
        """Return the shard that is a whole tensor."""
        return cls(name, dtype, shape, (0,) * len(shape), shape, per_rank)

    @property
    def region(self) -> Region:
        """Region of the whole tensor that the shard covers."""
        return Region(self.offsets, self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of this shard."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    @property
    def is_whole(self) -> bool:
        """True if this shard is all of its tensor."""
        return self.sizes == self.shape

    def file_key(self, rank: int) -> str:
        """Return the key in the safetensors file: the name, or `NAME@rN`.

        For a per-rank tensor N is the rank, otherwise the number of the shard. 0 is left out.
        """
        number = rank if self.per_rank else self.number
        return f"{self.name}@r{number}" if number else self.name


def check_name(name: str) -> None:
    """Raise for a tensor name that the format reserves."""
    if not is_text(name):
        raise InvalidInput(f"Tensor name {name!r} is not valid Unicode text. Rename the key.", key=name)
    if name == "__metadata__" or _RESERVED.search(name):
        raise InvalidInput(
            f"Tensor name {name!r} is reserved by the checkpoint format. Rename the key.", key=name
        )


class FileLayout(Struct, frozen=True):
    """Positions of all shards in a data file."""

    header: bytes  # from byte 0, including length prefix and padding
    starts: tuple[int, ...]  # byte offset in the file of each shard, in the order given
    file_bytes: int


def lay_out(shards: list[Shard], rank: int) -> FileLayout:
    """Lay shards out as one safetensors file.

    Wider dtypes come first, so that every tensor is aligned to its element without holes, which the
    safetensors format forbids.
    """
    order = sorted(range(len(shards)), key=lambda i: -ITEM_BYTES[shards[i].dtype])
    header: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    starts = [0] * len(shards)
    position = 0
    for index in order:
        shard = shards[index]
        check_name(shard.name)
        key, stop = shard.file_key(rank), position + shard.num_bytes
        if key in header:
            raise InvalidInput(
                f"Rank {rank} has two shards of {key}; a data file holds one of each.", key=key
            )
        header[key] = {"dtype": shard.dtype, "shape": list(shard.sizes), "data_offsets": [position, stop]}
        sharding[key] = {"saved_offsets": list(shard.offsets)}
        starts[index], position = position, stop
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(sharding)}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % BLOCK_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInput(
            f"{len(shards)} tensors need a header of {len(text)} bytes; safetensors allows 100 MB."
        )
    prefix = struct.pack("<Q", len(text)) + text
    return FileLayout(prefix, tuple(len(prefix) + start for start in starts), len(prefix) + position)


def header_bytes(head: bytes | memoryview) -> int:
    """Return the bytes of a safetensors header with its length prefix; 0 for less than a prefix."""
    return 8 + int(struct.unpack_from("<Q", head)[0]) if len(head) >= 8 else 0


def parse_header(head: bytes, what: str) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors header by key, `__metadata__` included, and the offset of the data.

    `head` are the file's first bytes, at least the whole header.
    """
    size = struct.unpack_from("<Q", head)[0] if len(head) >= 8 else -1
    if not 0 < size <= min(MAX_HEADER_BYTES, len(head) - 8):
        raise Corrupt(f"{what} does not have a safetensors header (length field: {size}).", key=what)
    header = f"{what}: the safetensors header"
    text = bytes(head[8 : 8 + size])
    return decode_as(dict[str, Any], text, header, max_bytes=MAX_HEADER_BYTES), 8 + size


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
