"""JSON from outside is decoded within limits, and only our errors come out."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from holdfast.errors import Corrupt
from holdfast.system.documents import decode, is_text, read_as, shown, to_plain

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | text
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(values, st.booleans())
def test_json_comes_back(value: Any, is_ascii: bool) -> None:
    """Escaped or not, as text or as bytes."""
    written = json.dumps(value, ensure_ascii=is_ascii)
    assert decode(written, "doc") == value
    assert decode(written.encode(), "doc") == value


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_only_our_error_comes_out(written: bytes | str) -> None:
    with contextlib.suppress(Corrupt):
        decode(written, "doc")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ('{"a":[' * 33 + "0" + "]}" * 33, "nested more than 64 deep"),
        ('["]]]]",' * 70 + "0" + "]" * 70, "nested more than 64 deep"),
        ("[" * 100_000, "nested"),
        ("1" * 21, "an integer of 21 digits"),
        ("-" + "1" * 5000, "an integer of 5001 digits"),
        ("0." + "1" * 100, "a number of 102 characters"),
        ("1e999", "1e999, which is not finite"),
        *((name, f"{name}, which is not JSON") for name in ("NaN", "Infinity", "-Infinity")),
        ('{"a":1,"b":2,"a":1}', "the key 'a' is in an object twice"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('{"\\udfff":1}', "surrogates not allowed"),
        ('"\ud800"', "surrogates not allowed"),
        (b'"\xff"', "invalid start byte"),
        (json.dumps([1]).encode("utf-16"), "is not valid JSON"),
        ("x" * ((1 << 20) + 1), "it has 1048577 bytes; at most 1048576"),
        ("", "is not valid JSON"),
        ("1 2", "Extra data"),
    ],
)
def test_what_exceeds_a_limit_is_refused(written: bytes | str, reason: str) -> None:
    with pytest.raises(Corrupt, match=re.escape(reason)):
        decode(written, "the-document")


def test_limits_are_inclusive() -> None:
    for written in ("[" * 64 + "]" * 64, "1" * 20, '"' + "[" * 1000 + '"', '"\\ud83d\\ude00"'):
        assert decode(written, "doc") == json.loads(written)
    assert decode("[" * 200 + "]" * 200, "doc", max_depth=200)


def test_any_value_is_shown_in_a_few_words() -> None:
    """In errors; not every value can be written out."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, 10**5000, "x" * 10**6, "\ud800", {"a": deep}, None, 2.5, True, object()):
        assert len(shown(value)) < 200


def test_lone_surrogates_are_refused() -> None:
    assert is_text("é\N{GRINNING FACE}")
    assert not is_text("a\udcff")


class _Weights(Struct):
    numbers: dict[str, int]


class _Document(Struct):
    weights: _Weights


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (dict[str, int], {"a": 1, "b": None}, "Expected `int`, got `null` - at `$[...]`."),
        (_Document, {"weights": {"numbers": {"a": 1, "b": "x"}}}, "at `$.weights.numbers[...]`."),
        (_Document, {"weights": {"numbers": []}}, "Expected `object`, got `array` - at `$.weights.numbers`."),
        (list[dict[str, int]], [{"a": 1}, {"b": "x"}], "at `$[1][...]`."),
        (dict[str, int], {"a": "\ud800"}, "surrogates not allowed."),
    ],
)
def test_an_error_names_the_member(kind: Any, value: Any, fault: str) -> None:
    with pytest.raises(Corrupt, match=re.escape(fault) + "$"):
        read_as(kind, value, "doc")


def test_values_of_subclasses_are_written_as_plain_ones() -> None:
    found = to_plain({"a": np.float64(1.5), "b": [np.str_("x")], "c": type("Number", (int,), {})(3)})
    assert found == {"a": 1.5, "b": ["x"], "c": 3}
    assert {type(found["a"]), type(found["b"][0]), type(found["c"])} == {float, str, int}
    with pytest.raises(TypeError, match="A object is no value of JSON"):
        to_plain({"a": object()})
