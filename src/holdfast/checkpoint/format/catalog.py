"""Catalog: dtypes, shapes and partitionings of all tensors that a rank holds, the same on many ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import (
    EvenPartitioning,
    ListedPartitioning,
    Partitioning,
    Region,
    Shard,
)
from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES, MAX_TENSOR_BYTES, Name, Rank, Sizes
from holdfast.checkpoint.format.sealed import dumps
from holdfast.errors import Corrupt
from holdfast.system.documents import Count, decode_as, read_as, shown

EACH, SPLIT = "each", "split"
"""Owners that are no rank: every rank has its own / several ranks hold regions."""


class Tensor(Struct, frozen=True):
    """One tensor of a checkpoint.

    `partitioning` - the regions of the tensor and their writers; None for a per-rank tensor. `held_by` -
    all ranks that had the tensor, or a region of it, when it was saved.
    """

    dtype: str
    shape: tuple[int, ...]
    partitioning: Partitioning | None
    held_by: tuple[int, ...] = ()
    frozen: bool = False  # stored in the second file of its writers, see `part.Part.frozen`

    @property
    def owner(self) -> int | str:
        """The rank that wrote all of it, `EACH` or `SPLIT`."""
        if self.partitioning is None:
            return EACH
        is_whole = isinstance(self.partitioning, EvenPartitioning) and not self.partitioning.splits
        return self.partitioning.ranks[0] if is_whole else SPLIT


class Catalog(Struct, frozen=True):
    """The tensors that ranks have in common, without per-rank ones."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]  # alias -> name of the same tensor

    def written_by(self, rank: int) -> Iterator[tuple[str, Tensor, Region]]:
        """Yield each (name, tensor, region) that a rank wrote, in order, including empty regions.

        The regions of a tensor follow one another.
        """
        indices_in: dict[int, tuple[int, ...]] = {}  # by id of a partitioning: thousands of tensors share few
        for name, tensor in self.tensors.items():
            partitioning = tensor.partitioning
            assert partitioning is not None
            if id(partitioning) not in indices_in:
                indices_in[id(partitioning)] = partitioning.indices_of(rank)
            for index in indices_in[id(partitioning)]:
                yield name, tensor, partitioning.region_at(index, tensor.shape)

    def shards_of(self, rank: int) -> Iterator[Shard]:
        """Yield each shard that a rank wrote, in order."""
        before, number = None, 0
        for name, tensor, region in self.written_by(rank):
            number = number + 1 if name == before else 0
            before = name
            yield Shard(name, tensor.dtype, tensor.shape, *region, frozen=tensor.frozen, number=number)


def catalog_text(catalog: Catalog) -> bytes:
    """Return canonical JSON of a catalog on one line. Costly, so callers cache it."""
    cuts: dict[Any, int] = {}
    groups: dict[Any, int] = {}
    known: dict[int, int] = {}
    rows = {
        name: [
            t.dtype,
            t.shape,
            _number(cuts, t.partitioning, known),
            _number(groups, t.held_by, known),
            int(t.frozen),
        ]
        for name, t in catalog.tensors.items()
    }
    bodies = [
        asdict(one)
        if isinstance(one, EvenPartitioning)
        else {"boxes": [[rank, *region] for rank, region in one.rows]}
        for one in cuts
    ]
    return dumps({"cuts": bodies, "groups": list(groups), "tensors": rows, "tied": catalog.tied})


def _number(numbers: dict[Any, int], thing: Any, known: dict[int, int]) -> int:
    """Return the number of an object, the same one for equal objects, in order of appearance."""
    # By identity first: thousands of tensors share a few partitionings, and comparing those of a thousand
    # ranks is slow.
    found = known.get(id(thing))
    if found is None:
        found = known[id(thing)] = numbers.setdefault(thing, len(numbers))
    return found


def parse_catalog(text: bytes, what: str) -> Catalog:
    """Parse a catalog from a line of JSON."""
    try:
        return _parse(text)
    except (ValueError, Corrupt) as error:
        raise Corrupt(
            f"{what} is sealed, but its catalog cannot be parsed: {str(error).rstrip('.')}.", key=what
        ) from error


class _Boxes(Struct):
    """A `ListedPartitioning` in a catalog: the writer of each region, its offsets and its sizes."""

    boxes: tuple[tuple[Rank, Sizes, Sizes], ...]


class _CatalogMembers(Struct):
    """Members of a catalog. Tensors share partitionings and holders, and have their numbers."""

    cuts: list[dict[str, Any]]  # the members of an `EvenPartitioning`, or of `_Boxes`
    groups: list[tuple[Rank, ...]]
    tensors: dict[Name, tuple[str, Sizes, Count, Count, int | bool]]
    tied: dict[str, str]


@lru_cache(maxsize=4)  # all parts of a checkpoint hold the same few, and so does its manifest
def _parse(text: bytes) -> Catalog:
    body = decode_as(_CatalogMembers, text, "the catalog", max_bytes=MAX_DOCUMENT_BYTES)
    partitionings = list(map(_partitioning, body.cuts))
    num_dims = list(map(_num_dims, partitionings))
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, number, group, frozen) in body.tensors.items():
        check_tensor(name, dtype, shape)
        if number >= len(partitionings) or group >= len(body.groups):
            raise ValueError(
                f"tensor {shown(name)} has partitioning {number} of group {group}: unknown numbers"
            )
        least, most = num_dims[number]
        if not least <= len(shape) <= most:
            raise ValueError(
                f"tensor {shown(name)} of {len(shape)} dimensions does not fit partitioning {number}"
            )
        tensors[name] = Tensor(dtype, shape, partitionings[number], body.groups[group], bool(frozen))
    return Catalog(tensors, body.tied)


# Anybody can seal anything: the rest of the code relies on these checks.


def _partitioning(cut: dict[str, Any]) -> Partitioning:
    if "boxes" not in cut:
        return read_as(EvenPartitioning, cut, "a partitioning")
    rows = read_as(_Boxes, cut, "a partitioning").boxes
    return ListedPartitioning(tuple((rank, Region(offsets, sizes)) for rank, offsets, sizes in rows))


def _num_dims(partitioning: Partitioning) -> tuple[int, int]:
    """Return the minimum and maximum number of dimensions of a tensor with this partitioning."""
    if isinstance(partitioning, EvenPartitioning):
        return max((dim + 1 for dim, _ in partitioning.splits), default=0), sys.maxsize
    counts = [len(side) for _, region in partitioning.rows for side in region]
    return max(counts, default=0), min(counts, default=sys.maxsize)


def check_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Check the dtype of a tensor in a document, and the shape of an empty one, which no bytes limit."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if 0 in shape and math.prod(filter(None, shape)) * ITEM_BYTES[dtype] > MAX_TENSOR_BYTES:
        raise ValueError(f"tensor {shown(name)} has the impossible shape {shown(list(shape))}")
