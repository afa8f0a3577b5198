"""The catalog: dtypes, shapes and cuts of all tensors that a rank takes part in; alike on many ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.errors import Corrupt
from holdfast.format.cuts import AnyCut, Box, Boxes, Cut
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
    groups = [tuple(group) for group in body["groups"]]
    tensors = {
        name: Tensor(dtype, tuple(shape), cuts[cut], groups[group], bool(frozen))
        for name, (dtype, shape, cut, group, frozen) in body["tensors"].items()
    }
    return Catalog(tensors, dict(body["tied"]))


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


def _cut(body: Mapping[str, Any]) -> AnyCut:
    if "boxes" in body:
        return Boxes(tuple((rank, Box(tuple(at), tuple(long))) for rank, at, long in body["boxes"]))
    return Cut(tuple((dim, parts) for dim, parts in body["splits"]), tuple(body["ranks"]))
