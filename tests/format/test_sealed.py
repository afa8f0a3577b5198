"""Every change of a sealed document is detected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.sealed import Versions, dumps, seal, unseal_lines
from holdfast.errors import Corrupt
from holdfast.system.documents import decode

text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
names = text.filter(lambda key: key not in ("xxh3_128", "format", "version"))
bodies = st.dictionaries(names, json_values, min_size=1, max_size=4)
EGG: Versions[Any] = Versions("egg", written=1, types={1: dict[str, Any]})
HEAD = {"format": "egg", "version": 1}


@given(bodies)
def test_sealed_documents_round_trip_and_are_valid_json(body: dict[str, object]) -> None:
    """Any JSON reader can read them: the seal is their first member."""
    sealed = seal(EGG.line(body))
    assert EGG.unseal(sealed, "doc") == HEAD | body
    document = json.loads(sealed)
    assert next(iter(document)) == "xxh3_128"
    del document["xxh3_128"]
    assert document == HEAD | body


def test_every_flipped_bit_is_detected() -> None:
    """All bits of a document of several lines, the seal's own punctuation included."""
    document = seal(dumps({"step": 500, "name": "é", "list": [1, 2.5, None]}) + b"\n[1,2]\nx")
    for position in range(len(document)):
        for bit in range(8):
            damaged = bytearray(document)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corrupt, match="the-document"):
                unseal_lines(bytes(damaged), "the-document")


@given(bodies, st.data())
def test_truncation_and_extra_bytes_are_detected(body: dict[str, object], data: st.DataObject) -> None:
    document = seal(dumps(body))
    cut = data.draw(st.integers(0, len(document) - 1))
    for damaged in (document[:cut], document + b"\n", document + bytes(4096), document[cut + 1 :]):
        with pytest.raises(Corrupt):
            EGG.unseal(damaged, "doc")
        with pytest.raises(Corrupt):
            unseal_lines(damaged, "doc")


@settings(max_examples=25)
@given(st.lists(bodies, min_size=1, max_size=4))
def test_lines_round_trip_in_order(lines: list[dict[str, object]]) -> None:
    """The first with its seal taken off; the seal covers all of them."""
    found = unseal_lines(seal(b"\n".join(map(dumps, lines))), "doc")
    assert [decode(line, "doc") for line in found] == lines


def test_unseal_refuses_a_document_of_several_lines() -> None:
    with pytest.raises(Corrupt, match="is not valid JSON"):
        EGG.unseal(seal(b'{"a":1}\n{"b":2}'), "doc")


@given(st.binary(max_size=200))
def test_foreign_bytes_are_corrupt(document: bytes) -> None:
    with pytest.raises(Corrupt):
        EGG.unseal(document, "doc")


@pytest.mark.parametrize("body", [b"{not json}", b"{" + b'"a":[' * 100_000, b'{"a":"\xff"}', b"{" + bytes(9)])
def test_a_valid_seal_around_invalid_json_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt, match="is not valid JSON"):
        EGG.unseal(seal(body), "doc")


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        dumps({"a": float("nan")})
