"""Values round-trip, and values that cannot are refused with their key path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holdfast.errors import Corrupt, InvalidInput, Unsupported
from holdfast.format.limits import MAX_VALUE_DEPTH
from holdfast.format.sealed import dumps
from holdfast.format.values import TensorRef, decode, encode

text = st.text(st.characters(exclude_categories=["Cs"]))  # all but lone surrogates
dates = st.dates() | st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc)) | st.timedeltas()
dtypes = arrays.scalar_dtypes()
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary()
    | st.binary().map(bytearray)
    | dates
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 5))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | text)
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.builds(TensorRef, text)
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 0])]
    )
    | st.sampled_from([pathlib.PurePosixPath("a/b c"), pathlib.PosixPath("/é")])
)
hashable = st.none() | st.booleans() | st.integers() | text | st.binary() | st.tuples(st.integers(), text)
array_values = arrays.arrays(dtypes, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(text.map("${}".format), inner, max_size=2)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(collections.OrderedDict)
        | st.builds(collections.deque, st.lists(inner, max_size=4), st.none() | st.integers(4, 9))
    )


sets = st.sets(hashable, max_size=4)
counters = st.dictionaries(text, st.integers(), max_size=4).map(collections.Counter)
trees = st.recursive(
    scalars | sets | sets.map(frozenset) | counters | array_values, containers, max_leaves=12
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down, NaN equal to NaN, -0.0 different from 0.0."""
    if isinstance(a, pathlib.PurePath) and isinstance(b, pathlib.PurePath):
        return str(a) == str(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple, collections.deque)):
        return (
            len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        )
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return a == b


def through_json(value: Any) -> Any:
    return decode(json.loads(dumps(encode(value, "root"))))


@given(trees)
def test_trees_of_values_round_trip(value: Any) -> None:
    """Order of keys, types, infinities, NaN, signed zeros, integers of any size: all as they were."""
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        *(float("inf"), float("-inf"), float("nan"), -0.0, 5e-324, 0.1 + 0.2),
        *(2**53, -(2**53), 2**53 - 1, 2**64, 10**2000),
        *map(decimal.Decimal, ("-0", "1E+5", "0.10", "Infinity", "9" * 4096)),
        *(
            {1: "int", "1": "str", (1, 2): None, None: 0, 1.5: []},
            {"$tuple": [1]},
            {"$unknown": 1, "x": 2},
            {"": {}},
        ),
        *(
            np.str_(""),
            np.str_("é"),
            np.float32(1.5),
            np.int64(-1),
            np.bool_(True),
            np.array(7),
            np.zeros((0, 3)),
        ),
        *(
            np.arange(6, dtype=">i4").reshape(2, 3),
            np.array(["a", "bcd"]),
            np.datetime64("2026-11-21T12:00", "ms"),
        ),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        *(set(), frozenset({frozenset({1}), 2}), collections.deque([1, 2], maxlen=2), collections.deque()),
        *(torch.float8_e4m3fn, torch.device("meta"), torch.Size([])),
        datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
        torch.Generator().manual_seed(1).get_state().numpy(),
    ],
    ids=repr,
)
def test_unusual_values_round_trip(value: Any) -> None:
    assert same(through_json(value), value)


def test_python_and_numpy_rng_states_round_trip() -> None:
    import random

    assert random.Random(1).getstate() == through_json(random.Random(1).getstate())
    state = np.random.default_rng(3).bit_generator.state
    assert through_json(state) == state


def test_decoded_arrays_can_be_written_to() -> None:
    array = through_json(np.arange(3))
    array[0] = 9
    assert list(array) == [9, 1, 2]


def test_equal_sets_give_equal_bytes() -> None:
    """The bytes of a part must not depend on the hash seed of a process."""
    first, second = set(map(str, range(100))), set(map(str, reversed(range(100))))
    assert dumps(encode(first, "")) == dumps(encode(second, ""))


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Facts:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (object(), "builtins.object"),
        (lambda: None, "function"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (Facts(), "Facts"),
        (collections.defaultdict(list), "defaultdict"),
        (torch.zeros(1), "Tensor"),
        (memoryview(b"x"), "memoryview"),
        (datetime.time(1), "time"),
        (np.array([object()]), "dtype object"),
        (np.zeros(1, dtype=[("a", "i4")]), "numpy array of dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        ("\udcff", "not valid Unicode"),
        (pathlib.PurePosixPath("a\udcff"), "not valid Unicode"),
        (1 << 9000, "9001 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else "value",
)
def test_the_error_has_the_path_of_a_refused_value(value: Any, word: str) -> None:
    """The error has the key path and the type, at any depth."""
    trees = [
        ({"a": [0, value]}, "state.a[1]"),
        ({"a": {1: (value,)}}, "state.a[1][0]"),
        (collections.OrderedDict(b=collections.deque([value])), "state['b'][0]"),
    ]
    for tree, path in trees:
        with pytest.raises(InvalidInput) as caught:
            encode(tree, "state")
        assert caught.value.key == path
        assert str(caught.value).startswith(path)
        assert word in str(caught.value)


def test_the_error_has_the_path_of_a_refused_key() -> None:
    for key in (object(), "\udcff"):
        with pytest.raises(InvalidInput, match=r"^state\.a\.<key ") as caught:
            encode({"a": {key: 1}}, "state")
        assert "key" in str(caught.value.key)


def test_numpy_extension_dtypes_are_refused() -> None:
    """A dtype that numpy itself does not name, such as ml_dtypes' bfloat16, would come back as raw bytes."""

    class Foreign:
        hasobject = False
        names = None
        str = "<V2"

        def __eq__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

    class Array:
        dtype = Foreign()

    from holdfast.format.values import _encode_numpy

    with pytest.raises(InvalidInput, match="only plain dtypes"):
        _encode_numpy(Array(), "a")


def test_unknown_tags_are_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"\$quaternion"):
        decode({"a": [{"$quaternion": [1, 2, 3, 4]}]})


def test_an_array_of_objects_is_refused() -> None:
    """A forged document cannot have Python objects made from bytes."""
    with pytest.raises(Corrupt):
        decode({"$ndarray": ["|O", [1], "AAAAAAAAAAA="]})


def test_cycles_and_deep_nesting_are_refused() -> None:
    """What is written can be read back: the limit is the reader's."""
    own: list[Any] = []
    own.append(own)
    deep: Any = 0
    for _ in range(MAX_VALUE_DEPTH + 1):
        deep = [deep]
    for value in (own, deep, {"a": deep}):
        with pytest.raises(InvalidInput, match="state contains itself, or is nested too deeply") as caught:
            encode(value, "state")
        assert caught.value.key == "state"
    assert through_json(deep[0]) == deep[0]


@pytest.mark.parametrize(
    "body",
    [
        *(
            {"$int": "1" * 3000},
            {"$int": 5},
            {"$float": []},
            {"$set": [[1]]},
            {"$dict": [[1]]},
            {"$dict": [[[], 1]]},
        ),
        *(
            {"$range": [1, 2, 0]},
            {"$range": "abc"},
            {"$deque": [-1, []]},
            {"$deque": [10**30, []]},
            {"$date": 1},
        ),
        *(
            {"$ndarray": ["<U0", [10**9], ""]},
            {"$ndarray": ["<f4", [2], ""]},
            {"$ndarray": ["<f4,<f4", [0], ""]},
        ),
        *(
            {"$timedelta": [10**18, 0, 0]},
            {"$torch": ["device", "no"]},
            {"$torch": ["size", ["1"]]},
            {"$path": 1},
        ),
        {"$set": [{"$int": str(i * (2**61 - 1))} for i in range(4000)]},
    ],
    ids=lambda body: str(body)[:40],
)
def test_invalid_bodies_of_tags_are_corrupt(body: Any) -> None:
    """The last one is a set of integers with one hash, which would take quadratic time."""
    with pytest.raises(Corrupt, match="cannot be decoded"):
        decode(body)


@pytest.mark.parametrize("text", ["NaN", "-NaN", "sNaN", "NaN123"])
def test_decimals_that_are_no_numbers_round_trip(text: str) -> None:
    assert str(through_json(decimal.Decimal(text))) == text


@pytest.mark.parametrize(
    "body",
    [
        {"$decimal": " 1"},
        {"$decimal": "1_0"},
        {"$decimal": "x"},
        {"$decimal": "9" * 4097},
        {"$decimal": 1},
        {"$uuid": "x"},
        {"$uuid": "{12345678-1234-5678-1234-567812345678}"},
        {"$uuid": "12345678123456781234567812345678"},
        {"$slice": [1, 2]},
        {"$slice": "123"},
        {"$set": [{"$decimal": "sNaN"}]},
    ],
)
def test_damaged_decimals_uuids_and_slices_are_corrupt(body: Any) -> None:
    with pytest.raises(Corrupt):
        decode(body)


def test_a_decimal_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidInput, match="root is a Decimal of 4097 characters"):
        encode(decimal.Decimal("9" * 4097), "root")
