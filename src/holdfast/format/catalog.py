"""The catalog: dtypes, shapes and cuts of all tensors that a rank takes part in; alike on many ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.errors import Corrupt
from holdfast.format.cuts import AnyCut, Box, Boxes, Cut
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.sealed import dumps, read_integers

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
        for name, tensor in self.tensors.items():
            assert tensor.cut is not None
            box = tensor.cut.box_of(rank, tensor.shape)
            if box is not None:
                yield name, tensor, box


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
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(
            f"{what} is sealed but has no catalog that can be read: {error!r}.", key=what
        ) from error


@lru_cache(maxsize=4)  # all parts of a checkpoint hold the same few, and so does its manifest
def _parse(text: bytes) -> Catalog:
    body = json.loads(text)
    cuts = [_cut(row) for row in body["cuts"]]
    groups = [read_integers(group) for group in body["groups"]]
    num_dims = [_num_dims(cut) for cut in cuts]
    tensors = {name: _tensor(row, cuts, groups, num_dims) for name, row in body["tensors"].items()}
    return Catalog(tensors, _tied(body["tied"]))


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


# What a stranger has sealed may be anything: what is read here is what the rest of the code may rely on.


def _cut(body: Mapping[str, Any]) -> AnyCut:
    if "boxes" in body:
        rows = (
            (*read_integers([rank]), read_integers(at), read_integers(long))
            for rank, at, long in body["boxes"]
        )
        return Boxes(tuple((rank, Box(at, long)) for rank, at, long in rows))
    splits = tuple(read_integers([dim, parts]) for dim, parts in body["splits"])
    if not all(dim >= 0 and parts > 0 for dim, parts in splits):
        raise ValueError(f"a tensor cannot be cut by {splits!r:.100}")
    ranks = read_integers(body["ranks"])
    if not ranks:
        raise ValueError(f"a cut {splits} that no rank has written")
    return Cut(tuple((dim, parts) for dim, parts in splits), ranks)


def _num_dims(cut: AnyCut) -> tuple[int, int]:
    """How many dimensions a tensor of this cut has at least, and at most."""
    if isinstance(cut, Cut):
        return max((dim + 1 for dim, _ in cut.splits), default=0), sys.maxsize
    counts = [len(side) for _, box in cut.rows for side in box]
    return max(counts, default=0), min(counts, default=sys.maxsize)


def _tensor(
    row: Sequence[Any],
    cuts: Sequence[AnyCut],
    groups: Sequence[tuple[int, ...]],
    num_dims: Sequence[tuple[int, int]],
) -> Tensor:
    dtype, sizes, cut, group, frozen = row
    shape = read_integers(sizes)
    if dtype not in ITEM_BYTES or min(shape, default=0) < 0:
        raise ValueError(f"a tensor that is {dtype!r:.100}{list(shape)!r:.100}")
    least, most = num_dims[cut]
    if cut < 0 or group < 0 or not least <= len(shape) <= most:
        raise ValueError(f"a tensor of {len(shape)} dimensions with cut {cut} of group {group}")
    return Tensor(dtype, shape, cuts[cut], groups[group], bool(frozen))


def _tied(body: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(name, str) for name in body.values()):
        raise TypeError(f"aliases of what is no name: {body!r:.100}")
    return dict(body)
