"""Catalog: dtypes, shapes and cuts of all tensors that a rank holds, the same on many ranks."""

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

    `cut` - the boxes of the tensor and their writers; None for a per-rank tensor. `held_by` - all ranks that
    had the tensor, or a box of it, when it was saved.
    """

    dtype: str
    shape: tuple[int, ...]
    cut: AnyCut | None
    held_by: tuple[int, ...] = ()
    frozen: bool = False  # stored in the second file of its writers, see `part.Part.frozen`

    @property
    def owner(self) -> int | str:
        """The rank that wrote all of it, `EACH` or `SPLIT`."""
        if self.cut is None:
            return EACH
        return self.cut.ranks[0] if isinstance(self.cut, Cut) and not self.cut.splits else SPLIT


@dataclass(frozen=True, slots=True)
class Catalog:
    """The tensors that ranks have in common, without per-rank ones."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]  # alias -> name of the same tensor

    def written_by(self, rank: int) -> Iterator[tuple[str, Tensor, Box]]:
        """Yield each (name, tensor, box) that a rank wrote, in order, including empty boxes."""
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
    """Return canonical JSON of a catalog on one line. Costly, so callers cache it."""
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
    """Parse a catalog from a line of JSON.

    Raises:
        Corrupt: it is not a catalog.
    """
    try:
        return _parse(text)
    except (ValueError, Corrupt) as error:
        raise Corrupt(f"{what} is sealed, but its catalog cannot be parsed: {error}.", key=what) from error


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
    """Assigns the same number to equal objects, in order of appearance.

    By identity first: thousands of tensors share a few cuts, and comparing a cut of a thousand ranks is slow.
    """

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}
        self._by_id: dict[int, int] = {}

    def number(self, thing: Any) -> int:
        """Return the number of an object, which must live as long as this."""
        known = self._by_id.get(id(thing))
        if known is None:
            known = self._by_id[id(thing)] = self.found.setdefault(thing, len(self.found))
        return known


def _cut_body(cut: AnyCut) -> dict[str, Any]:
    if isinstance(cut, Cut):
        return {"splits": cut.splits, "ranks": cut.ranks}
    return {"boxes": [[rank, *box] for rank, box in cut.rows]}


# Anybody can seal anything: the rest of the code relies on these checks.


def _cut(body: Fields) -> AnyCut:
    if "boxes" in body:
        return Boxes(tuple(_box_row(row) for row in body.array("boxes")))
    splits = tuple(_split(row) for row in body.array("splits", max_items=MAX_SPLITS))
    ranks = body.integers("ranks", at_most=MAX_RANKS - 1)
    if not ranks:
        raise ValueError(f"a cut of {len(splits)} splits without a writer")
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
        ValueError: it is not an array of `count` items.
    """
    if type(row) is not list or len(row) != count:
        raise ValueError(f"{what} should be an array of {count} items, found {shown(row)}")
    return row


def _num_dims(cut: AnyCut) -> tuple[int, int]:
    """Return the minimum and maximum number of dimensions of a tensor with this cut."""
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
        raise ValueError(
            f"tensor {shown(name)} has cut {shown(cut)} of group {shown(group)}: unknown numbers"
        )
    least, most = num_dims[cut]
    if not least <= len(shape) <= most:
        raise ValueError(f"tensor {shown(name)} of {len(shape)} dimensions does not fit its cut {cut}")
    return Tensor(dtype, shape, cuts[cut], groups[group], bool(frozen))


def check_facts(name: Any, dtype: Any) -> None:
    """Check the name and dtype of a tensor in a document.

    Raises:
        ValueError: the name is not a text, or too long, or the dtype is unknown.
    """
    if type(name) is not str or len(name) > MAX_NAME_CHARS:
        raise ValueError(f"the name of a tensor should be a text of up to {MAX_NAME_CHARS} characters")
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")


def _tied(body: dict[str, Any]) -> dict[str, str]:
    for alias, name in body.items():
        if type(name) is not str:
            raise ValueError(f"{shown(alias)} is an alias of {shown(name)}, which is not a name")
    return body
