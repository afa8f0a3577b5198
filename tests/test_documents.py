"""JSON from outside is decoded within limits, and only our errors come out."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Corrupt
from holdfast.system.documents import Fields, decode, decode_object, is_text, read_integers, shown

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


FIELDS = decode_object(
    '{"integer":3,"number":2.5,"text":"a","flag":true,"none":null,"array":[1,"a"],"integers":[1,2],'
    '"texts":["a","b"],"object":{"inner":1}}',
    "the-document",
)


def test_members_are_read_with_their_types() -> None:
    assert (FIELDS.integer("integer"), FIELDS.number("number"), FIELDS.number("integer")) == (3, 2.5, 3.0)
    assert (FIELDS.text("text"), FIELDS.choice("text", {"a", "b"}), FIELDS.flag("flag")) == ("a", "a", True)
    assert (FIELDS.array("array"), FIELDS.integers("integers")) == ([1, "a"], (1, 2))
    assert (FIELDS.texts("texts"), FIELDS.fields("object").integer("inner")) == (("a", "b"), 1)
    assert "integer" in FIELDS
    assert "none" not in FIELDS
    assert "missing" not in FIELDS


READERS: dict[str, Any] = {
    "integer": lambda name: FIELDS.integer(name, at_most=2) if name == "integer" else FIELDS.integer(name),
    "number": lambda name: FIELDS.number(name, at_least=5),
    "text": lambda name: FIELDS.text(name, max_chars=0),
    "pattern": lambda name: FIELDS.text(name, pattern=re.compile("b")),
    "choice": lambda name: FIELDS.choice(name, {"b"}),
    "array": lambda name: FIELDS.array(name, max_items=1),
    "integers": lambda name: FIELDS.integers(name, max_items=1),
    "texts": lambda name: FIELDS.texts(name, max_items=1),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", [*FIELDS.members, "missing"])
def test_a_member_of_another_type_or_beyond_a_limit_is_corrupt(reader: str, name: str) -> None:
    """Document and member are named."""
    with pytest.raises(Corrupt, match=rf"the-document.*{name}"):
        READERS[reader](name)


def test_a_value_that_is_not_an_object_is_corrupt() -> None:
    for value in ([], "text", 3, None):
        with pytest.raises(Corrupt, match="doc should be a JSON object"):
            Fields(value, "doc")


@pytest.mark.parametrize(
    "value", [None, 3, "12", {"a": 1}, [1.0], [True], ["1"], [[1]], [None], (1,), [-1], [2**53], [2**70]]
)
def test_a_value_that_is_not_an_array_of_counts_is_refused(value: object) -> None:
    assert read_integers([]) == ()
    assert read_integers([0, 2**53 - 1]) == (0, 2**53 - 1)
    assert read_integers([-1], at_least=-1) == (-1,)
    with pytest.raises(ValueError, match="expected an array of integers"):
        read_integers(value)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("bad", [1.0, True, "1", None, [1], -1, 2**53, 2**70, float("nan")])
def test_one_bad_item_at_any_place_of_an_array_of_counts_is_refused(bad: object, length: int) -> None:
    for place in {0, length // 2, length - 1}:
        items: list[object] = [*range(length)]
        assert read_integers(items) == tuple(range(length))
        items[place] = bad
        with pytest.raises(ValueError, match="expected an array of integers"):
            read_integers(items)


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
