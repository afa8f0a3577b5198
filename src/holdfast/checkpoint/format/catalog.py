"""Catalog: dtypes, shapes and partitionings of all tensors that a rank holds, the same on many ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import (
    EvenPartitioning,
    ListedPartitioning,
    Partitioning,
    Region,
    Shard,
)
from holdfast.checkpoint.format.limits import (
    MAX_DIMS,
    MAX_DOCUMENT_BYTES,
    MAX_NAME_CHARS,
    MAX_RANKS,
    MAX_SPLITS,
    MAX_TENSOR_BYTES,
)
from holdfast.checkpoint.format.sealed import dumps
from holdfast.errors import Corrupt
from holdfast.system.documents import Fields, decode_object, read_integers, shown

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
        {"splits": one.splits, "ranks": one.ranks}
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
        raise Corrupt(f"{what} is sealed, but its catalog cannot be parsed: {error}.", key=what) from error


@lru_cache(maxsize=4)  # all parts of a checkpoint hold the same few, and so does its manifest
def _parse(text: bytes) -> Catalog:
    body = decode_object(text, "the catalog", max_bytes=MAX_DOCUMENT_BYTES)
    partitionings = [_partitioning(Fields(row, "a partitioning")) for row in body.array("cuts")]
    groups = [read_integers(group, at_most=MAX_RANKS - 1) for group in body.array("groups")]
    num_dims = [_num_dims(one) for one in partitionings]
    rows = body.fields("tensors").members
    tensors = {name: _tensor(name, row, partitionings, groups, num_dims) for name, row in rows.items()}
    tied = body.fields("tied").members
    for alias, name in tied.items():
        if type(name) is not str:
            raise ValueError(f"{shown(alias)} is an alias of {shown(name)}, which is not a name")
    return Catalog(tensors, tied)


# Anybody can seal anything: the rest of the code relies on these checks.


def _partitioning(body: Fields) -> Partitioning:
    if "boxes" in body:
        return ListedPartitioning(tuple(map(_region_row, body.array("boxes"))))
    splits = tuple(map(_split, body.array("splits", max_items=MAX_SPLITS)))
    ranks = body.integers("ranks", at_most=MAX_RANKS - 1)
    if not ranks:
        raise ValueError(f"a partitioning of {len(splits)} splits without a writer")
    return EvenPartitioning(splits, ranks)


def _split(row: Any) -> tuple[int, int]:
    dim, parts = columns(row, 2, "a split")
    (dim,) = read_integers([dim], at_most=MAX_DIMS - 1)
    (parts,) = read_integers([parts], at_least=1, at_most=MAX_RANKS)
    return dim, parts


def _region_row(row: Any) -> tuple[int, Region]:
    rank, offsets, sizes = columns(row, 3, "a region")
    (rank,) = read_integers([rank], at_most=MAX_RANKS - 1)
    return rank, Region(read_integers(offsets, max_items=MAX_DIMS), read_integers(sizes, max_items=MAX_DIMS))


def columns(row: Any, count: int, what: str) -> list[Any]:
    """Return a row of a document."""
    if type(row) is not list or len(row) != count:
        raise ValueError(f"{what} should be an array of {count} items, found {shown(row)}")
    return row


def _num_dims(partitioning: Partitioning) -> tuple[int, int]:
    """Return the minimum and maximum number of dimensions of a tensor with this partitioning."""
    if isinstance(partitioning, EvenPartitioning):
        return max((dim + 1 for dim, _ in partitioning.splits), default=0), sys.maxsize
    counts = [len(side) for _, region in partitioning.rows for side in region]
    return max(counts, default=0), min(counts, default=sys.maxsize)


def _tensor(
    name: str,
    row: Any,
    partitionings: Sequence[Partitioning],
    groups: Sequence[tuple[int, ...]],
    num_dims: Sequence[tuple[int, int]],
) -> Tensor:
    dtype, sizes, number, group, frozen = columns(row, 5, "a tensor")
    shape = read_integers(sizes, max_items=MAX_DIMS)
    check_facts(name, dtype)
    check_size(name, dtype, shape)
    if type(number) is not int or type(group) is not int or type(frozen) not in (int, bool):
        raise ValueError(f"tensor {shown(name)} has partitioning {shown(number)} of group {shown(group)}")
    if not (0 <= number < len(partitionings) and 0 <= group < len(groups)):
        raise ValueError(
            f"tensor {shown(name)} has partitioning {shown(number)} of group {shown(group)}: unknown numbers"
        )
    least, most = num_dims[number]
    if not least <= len(shape) <= most:
        raise ValueError(
            f"tensor {shown(name)} of {len(shape)} dimensions does not fit partitioning {number}"
        )
    return Tensor(dtype, shape, partitionings[number], groups[group], bool(frozen))


def check_facts(name: Any, dtype: Any) -> None:
    """Check the name and dtype of a tensor in a document."""
    if type(name) is not str or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"the name of a tensor should be a text of up to {MAX_NAME_CHARS} characters")
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")


def check_size(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Check the shape of a tensor without elements, which no bytes limit."""
    if 0 in shape and math.prod(filter(None, shape)) * ITEM_BYTES[dtype] > MAX_TENSOR_BYTES:
        raise ValueError(f"tensor {shown(name)} has the impossible shape {shown(list(shape))}")
