"""Catalogs round-trip, and invalid ones from outside are corrupt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from format.drawing import catalogs
from holdfast.checkpoint.format.catalog import SPLIT, Catalog, Tensor, catalog_text, parse_catalog
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Region, whole
from holdfast.errors import Corrupt

RANKS = list(range(7))


@settings(max_examples=40)
@given(catalogs(RANKS))
def test_a_catalog_round_trips_and_equal_ones_have_equal_bytes(value: Catalog) -> None:
    """Cuts by rule, listed regions, holders, frozen tensors and aliases; ranks compare digests of them."""
    line = catalog_text(value)
    found = parse_catalog(line, "catalog")
    assert found == value
    assert list(found.tensors) == list(value.tensors), "the order is part of it"
    assert b"\n" not in line
    assert catalog_text(found) == line


@settings(max_examples=40)
@given(catalogs(RANKS), st.sampled_from(RANKS))
def test_written_by_yields_the_regions_of_a_rank(value: Catalog, rank: int) -> None:
    expected = [
        (name, tensor, region)
        for name, tensor in value.tensors.items()
        if tensor.partitioning is not None
        for writer, region in tensor.partitioning.regions(tensor.shape)
        if writer == rank
    ]
    assert list(value.written_by(rank)) == expected


def test_shared_partitionings_and_holders_are_written_once() -> None:
    ranks = tuple(range(1024))
    rows = EvenPartitioning(((0, 1024),), ranks)
    held = {f"w{i}": Tensor("F32", (4096, 8), rows, ranks) for i in range(100)}
    body = json.loads(catalog_text(Catalog(held, {})))
    assert len(body["cuts"]) == len(body["groups"]) == 1
    assert body["tensors"]["w99"] == ["F32", [4096, 8], 0, 0, 0]


def test_owner_is_the_writer_of_a_whole_tensor() -> None:
    assert Tensor("F32", (4,), whole(2)).owner == 2
    assert Tensor("F32", (4,), EvenPartitioning(((0, 1),), (2,))).owner == SPLIT
    assert Tensor("F32", (4,), ListedPartitioning(((2, Region((0,), (4,))),))).owner == SPLIT
    assert Tensor("F32", (4,), None).owner == "each"


def body_of(partitioning: Any = None, row: Any = None, **change: Any) -> Any:
    """The body of a catalog, with one tensor of shape (4, 2) that two ranks share, with changes."""
    partitioning = {"splits": [[0, 2]], "ranks": [0, 1]} if partitioning is None else partitioning
    row = ["F32", [4, 2], 0, 0, 0] if row is None else row
    return {"cuts": [partitioning], "groups": [[0, 1]], "tensors": {"w": row}, "tied": {}, **change}


HOSTILE: dict[str, Any] = {
    "an array": [],
    "null": None,
    "no cuts": body_of(cuts=None),
    "cuts that are a number": body_of(cuts=3),
    "a cut that is a string": body_of("splits"),
    "no parts": body_of({"splits": [[0, 0]], "ranks": [0, 1]}),
    "less than no parts": body_of({"splits": [[0, -2]], "ranks": [0, 1]}),
    "half a part": body_of({"splits": [[0, 2.5]], "ranks": [0, 1]}),
    "parts that are text": body_of({"splits": [[0, "2"]], "ranks": [0, 1]}),
    "a dimension below 0": body_of({"splits": [[-1, 2]], "ranks": [0, 1]}),
    "a dimension that the tensor lacks": body_of({"splits": [[2, 2]], "ranks": [0, 1]}),
    "a split of three numbers": body_of({"splits": [[0, 2, 2]], "ranks": [0, 1]}),
    "no writer": body_of({"splits": [], "ranks": []}),
    "a writer that is true": body_of({"splits": [[0, 2]], "ranks": [0, True]}),
    "writers that are text": body_of({"splits": [[0, 2]], "ranks": "01"}),
    "writers that are arrays": body_of({"splits": [[0, 2]], "ranks": [[0], [1]]}),
    "regions of one dimension": body_of({"boxes": [[0, [0], [4]]]}),
    "regions of unlike dimensions": body_of({"boxes": [[0, [0, 0], [4]]]}),
    "a region at null": body_of({"boxes": [[0, None, [4, 2]]]}),
    "a region of text": body_of({"boxes": [[0, "00", [4, 2]]]}),
    "a region of an array": body_of({"boxes": [[[0], [0, 0], [4, 2]]]}),
    "regions that are a number": body_of({"boxes": 5}),
    "a shape that is text": body_of(row=["F32", "42", 0, 0, 0]),
    "a shape below 0": body_of(row=["F32", [4, -2], 0, 0, 0]),
    "a shape with infinity": body_of(row=["F32", [4, float("inf")], 0, 0, 0]),
    "an unknown dtype": body_of(row=["F13", [4, 2], 0, 0, 0]),
    "a dtype that is an array": body_of(row=[["F32"], [4, 2], 0, 0, 0]),
    "a cut that does not exist": body_of(row=["F32", [4, 2], 1, 0, 0]),
    "a cut below 0": body_of(row=["F32", [4, 2], -1, 0, 0]),
    "a group that there is not": body_of(row=["F32", [4, 2], 0, 1, 0]),
    "a group below 0": body_of(row=["F32", [4, 2], 0, -1, 0]),
    "a short row": body_of(row=["F32", [4, 2], 0, 0]),
    "a long row": body_of(row=["F32", [4, 2], 0, 0, 0, 0]),
    "a group that is a number": body_of(groups=[1]),
    "holders that are text": body_of(groups=["01"]),
    "tensors that are an array": body_of(tensors=[]),
    "an alias of a number": body_of(tied={"a": 1}),
    "aliases that are a list": body_of(tied=[]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_invalid_catalogs_are_corrupt(what: str) -> None:
    """Whoever sealed it: never an error of the parser, and nothing that a reader would stumble over later."""
    with pytest.raises(Corrupt, match="the-catalog is sealed, but its catalog cannot be parsed"):
        parse_catalog(json.dumps(HOSTILE[what]).encode(), "the-catalog")


def test_the_valid_variant_of_the_invalid_catalogs_is_parsed() -> None:
    held = Tensor("F32", (4, 2), EvenPartitioning(((0, 2),), (0, 1)), (0, 1))
    assert parse_catalog(json.dumps(body_of()).encode(), "catalog") == Catalog({"w": held}, {})


@pytest.mark.parametrize(
    "line", [b"", b"{", b"\xff", b'{"cuts":' + b"[" * 100_000, b'{"cuts":' + b"1" * 5000]
)
def test_invalid_json_is_corrupt(line: bytes) -> None:
    with pytest.raises(Corrupt, match="the-catalog"):
        parse_catalog(line, "the-catalog")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.sampled_from(["", "F32", "w"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["w", "splits", "ranks"]), inner)
    ),
    max_leaves=8,
)


@given(st.data())
def test_any_value_of_a_member_is_parsed_or_corrupt(data: st.DataObject) -> None:
    """A catalog that was read can be used: its regions can be made and its text written."""
    body = body_of()
    spots = ("cuts", "groups", "tensors", "tied", "splits", "ranks", "row", "boxes")
    spot = data.draw(st.sampled_from(spots))
    value = data.draw(json_values)
    if spot in ("splits", "ranks"):
        body["cuts"][0][spot] = value
    elif spot == "boxes":
        body["cuts"][0] = {"boxes": value}
    elif spot == "row":
        body["tensors"]["w"][data.draw(st.integers(0, 4))] = value
    else:
        body[spot] = value
    try:
        found = parse_catalog(json.dumps(body).encode(), "catalog")
    except Corrupt:
        return
    for rank in (0, 1, 5):
        for _, tensor, region in found.written_by(rank):
            assert len(region.offsets) == len(tensor.shape)
    assert parse_catalog(catalog_text(found), "catalog") == found
