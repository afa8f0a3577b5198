"""The catalog: dtypes, shapes and cuts of all tensors that a rank takes part in; alike on many ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.documents import Fields, decode_object, read_integers, shown
from holdfast.errors import Corrupt
from holdfast.format.cuts import AnyCut, Box, Boxes, Cut
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.limits import MAX_DIMS, MAX_DOCUMENT_BYTES, MAX_NAME_CHARS, MAX_RANKS, MAX_SPLITS
from holdfast.format.sealed import dumps

EACH, SPLIT = "each", "split"
"""Owners that are no rank: every rank has its own / several ranks hold boxes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint.

    `cut` says which ranks wrote which boxes of it; it is None for a tensor of which every rank has its own.
    `held_by` are all ranks that had the tensor, or a box of it, when it was saved.
    """

    dtype: str
    shape: tuple[int, ...]
    cut: AnyCut | None
    held_by: tuple[int, ...] = ()
    frozen: bool = False  # stands in the second file of its writers, see `part.Part.frozen`

    @property
    def owner(self) -> int | str:
        """The rank that wrote all of it, `EACH` or `SPLIT`."""
        if self.cut is None:
            return EACH
        return self.cut.ranks[0] if isinstance(self.cut, Cut) and not self.cut.splits else SPLIT


@dataclass(frozen=True, slots=True)
class Catalog:
    """The tensors that ranks have in common; those of which every rank has its own are not among them."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]  # alias -> name of the tensor that it is

    def written_by(self, rank: int) -> Iterator[tuple[str, Tensor, Box]]:
        """What a rank wrote: (name, tensor, box) in the order of the catalog, empty boxes included."""
        index_in: dict[int, int | None] = {}  # by id of a cut: thousands of tensors share a few
        for name, tensor in self.tensors.items():
            cut = tensor.cut
            assert cut is not None
            if id(cut) not in index_in:
                index_in[id(cut)] = cut.index_of(rank)
            index = index_in[id(cut)]
            if index is not None:
                yield name, tensor, cut.box_at(index, tensor.shape)


def catalog_text(catalog: Catalog) -> bytes:
    """Canonical JSON of a catalog on one line; costly, so callers keep it with the structure."""
    cuts, groups = _Numbered(), _Numbered()
    rows = {
        name: [t.dtype, t.shape, cuts.number(t.cut), groups.number(t.held_by), int(t.frozen)]
        for name, t in catalog.tensors.items()
    }
    return dumps(
        {
            "cuts": [_cut_body(cut) for cut in cuts.found],
            "groups": list(groups.found),
            "tensors": rows,
            "tied": catalog.tied,
        }
    )


def parse_catalog(text: bytes, what: str) -> Catalog:
    """The catalog in a line of JSON.

    Raises:
        Corrupt: it is not a catalog.
    """
    try:
        return _parse(text)
    except (ValueError, Corrupt) as error:
        raise Corrupt(f"{what} is sealed but has no catalog that can be read: {error}.", key=what) from error


@lru_cache(maxsize=4)  # all parts of a checkpoint hold the same few, and so does its manifest
def _parse(text: bytes) -> Catalog:
    body = decode_object(text, "the catalog", max_bytes=MAX_DOCUMENT_BYTES)
    cuts = [_cut(Fields(row, "a cut")) for row in body.array("cuts")]
    groups = [read_integers(group, at_most=MAX_RANKS - 1) for group in body.array("groups")]
    num_dims = [_num_dims(cut) for cut in cuts]
    rows = body.fields("tensors").members
    tensors = {name: _tensor(name, row, cuts, groups, num_dims) for name, row in rows.items()}
    return Catalog(tensors, _tied(body.fields("tied").members))


class _Numbered:
    """Numbers equal things alike, in the order in which they come.

    By identity first: thousands of tensors share a few cuts, and comparing a cut of a thousand ranks is slow.
    """

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}
        self._by_id: dict[int, int] = {}

    def number(self, thing: Any) -> int:
        """The number of a thing, which must live as long as this does."""
        known = self._by_id.get(id(thing))
        if known is None:
            known = self._by_id[id(thing)] = self.found.setdefault(thing, len(self.found))
        return known


def _cut_body(cut: AnyCut) -> dict[str, Any]:
    if isinstance(cut, Cut):
        return {"splits": cut.splits, "ranks": cut.ranks}
    return {"boxes": [[rank, *box] for rank, box in cut.rows]}


# A stranger can seal anything: the rest of the code relies on what is checked here.


def _cut(body: Fields) -> AnyCut:
    if "boxes" in body:
        return Boxes(tuple(_box_row(row) for row in body.array("boxes")))
    splits = tuple(_split(row) for row in body.array("splits", max_items=MAX_SPLITS))
    ranks = body.integers("ranks", at_most=MAX_RANKS - 1)
    if not ranks:
        raise ValueError(f"a cut of {len(splits)} splits that no rank has written")
    return Cut(splits, ranks)


def _split(row: Any) -> tuple[int, int]:
    dim, parts = columns(row, 2, "a split")
    (dim,) = read_integers([dim], at_most=MAX_DIMS - 1)
    (parts,) = read_integers([parts], at_least=1, at_most=MAX_RANKS)
    return dim, parts


def _box_row(row: Any) -> tuple[int, Box]:
    rank, offsets, lengths = columns(row, 3, "a box")
    (rank,) = read_integers([rank], at_most=MAX_RANKS - 1)
    return rank, Box(read_integers(offsets, max_items=MAX_DIMS), read_integers(lengths, max_items=MAX_DIMS))


def columns(row: Any, count: int, what: str) -> list[Any]:
    """Return a row of a document.

    Raises:
        ValueError: it is no array of `count` items.
    """
    if type(row) is not list or len(row) != count:
        raise ValueError(f"{what} should be an array of {count} items, found {shown(row)}")
    return row


def _num_dims(cut: AnyCut) -> tuple[int, int]:
    """How many dimensions a tensor of this cut has at least, and at most."""
    if isinstance(cut, Cut):
        return max((dim + 1 for dim, _ in cut.splits), default=0), sys.maxsize
    counts = [len(side) for _, box in cut.rows for side in box]
    return max(counts, default=0), min(counts, default=sys.maxsize)


def _tensor(
    name: str,
    row: Any,
    cuts: Sequence[AnyCut],
    groups: Sequence[tuple[int, ...]],
    num_dims: Sequence[tuple[int, int]],
) -> Tensor:
    dtype, sizes, cut, group, frozen = columns(row, 5, "a tensor")
    shape = read_integers(sizes, max_items=MAX_DIMS)
    check_facts(name, dtype)
    if type(cut) is not int or type(group) is not int or type(frozen) not in (int, bool):
        raise ValueError(f"tensor {shown(name)} has cut {shown(cut)} of group {shown(group)}")
    if not (0 <= cut < len(cuts) and 0 <= group < len(groups)):
        raise ValueError(f"tensor {shown(name)} has cut {shown(cut)} of group {shown(group)}: there is none")
    least, most = num_dims[cut]
    if not least <= len(shape) <= most:
        raise ValueError(f"tensor {shown(name)} of {len(shape)} dimensions has cut {cut}, which has others")
    return Tensor(dtype, shape, cuts[cut], groups[group], bool(frozen))


def check_facts(name: Any, dtype: Any) -> None:
    """Check the name and dtype that a document gives a tensor.

    Raises:
        ValueError: the name is no text or too long, or there is no such dtype.
    """
    if type(name) is not str or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"the name of a tensor should be a text of up to {MAX_NAME_CHARS} characters")
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {shown(name)} has the dtype {shown(dtype)}, which is none")


def _tied(body: dict[str, Any]) -> dict[str, str]:
    for alias, name in body.items():
        if type(name) is not str:
            raise ValueError(f"{shown(alias)} is an alias of {shown(name)}, which is no name")
    return body
