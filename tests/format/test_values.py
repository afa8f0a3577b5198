"""Values round-trip, and values that cannot are refused with their key path."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import ipaddress
import json
import pathlib
import re
import string
import threading
import types
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from format.equality import same
from holdfast.checkpoint.format.array_values import encode_numpy
from holdfast.checkpoint.format.composites import RAW_DTYPES, SPARSE, SavedTensor
from holdfast.checkpoint.format.limits import MAX_VALUE_DEPTH
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.format.value_advice import advice_for
from holdfast.checkpoint.format.values import (
    EntryRef,
    SavedDataclass,
    SavedEnum,
    SavedNamedTuple,
    TensorRef,
    decode,
    encode,
)
from holdfast.errors import Corrupt, InvalidInput, Unsupported


def file_in_memory(content: bytes, position: int) -> io.BytesIO:
    file = io.BytesIO(content)
    file.seek(position)
    return file


def closed_file() -> io.BytesIO:
    file = io.BytesIO(b"x")
    file.close()
    return file


text = st.text(st.characters(exclude_categories=["Cs"]))  # all but lone surrogates
zones = st.none() | st.just(datetime.timezone.utc)
moments = st.datetimes(timezones=zones) | st.times(timezones=zones)
dates = st.dates() | st.timedeltas() | moments.map(lambda one: one.replace(fold=0))  # fold=1 is refused
dtypes = arrays.scalar_dtypes()
references = st.builds(TensorRef, text)
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
    | st.builds(file_in_memory, st.binary(), st.integers(0, 9))
    | dates
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 5))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | text)
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.fractions()
    | dtypes
    | st.builds(TensorRef, text)
    | st.builds(EntryRef, text)
    | st.builds(SavedEnum, text, text)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:3")])
    | st.sampled_from([torch.strided, torch.sparse_csr, torch.channels_last, torch.preserve_format])
    | st.sampled_from([torch.Size([2, 0]), pathlib.PurePosixPath("a/b c"), pathlib.PosixPath("/é")])
    | st.just(pathlib.PureWindowsPath("c:/é"))
)
pairs = st.lists(st.tuples(text, st.integers()), max_size=3, unique_by=lambda pair: pair[0]).map(tuple)
hashable = (
    st.builds(SavedEnum, text, text)
    | st.builds(SavedNamedTuple, text, pairs)
    | st.none()
    | st.booleans()
    | st.integers()
    | text
    | st.binary()
    | st.tuples(st.integers(), text)
)
structures = arrays.nested_dtypes(dtypes).filter(lambda dtype: not has_titles(dtype))
array_shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
array_values = arrays.arrays(dtypes | structures, array_shapes)


def members(namespace: Any, fields: dict[str, Any]) -> Any:
    vars(namespace).update(fields)
    return namespace


def composite_tensors(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Of classes and of all kinds of torch's own, some in each other."""
    short = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    sizes = st.lists(st.integers(0, 2**53 - 1), max_size=4)
    of_class = st.builds(
        SavedTensor,
        st.tuples(short, short).map(":".join),
        st.dictionaries(text.filter(bool), references, min_size=1, max_size=4),
        st.dictionaries(text, inner, max_size=3),
    )
    sparse = st.sampled_from(sorted(SPARSE)).flatmap(
        lambda kind: st.builds(
            SavedTensor,
            st.just(kind),
            st.tuples(*[references] * len(SPARSE[kind])).map(
                lambda found: dict(zip(SPARSE[kind], found, strict=True))
            ),
            st.fixed_dictionaries({"size": sizes, "coalesced": st.booleans()}),
        )
    )
    dtypes = st.sampled_from(sorted(RAW_DTYPES))
    of_dtype = st.builds(
        SavedTensor,
        st.just("dtype"),
        st.fixed_dictionaries({"raw": references}),
        st.fixed_dictionaries({"dtype": dtypes}),
    )
    single = of_class | sparse | of_dtype
    shards = st.builds(
        SavedTensor,
        st.just("dtensor"),
        st.fixed_dictionaries({"local": single}),
        st.fixed_dictionaries(dict.fromkeys(("shape", "offsets", "sizes"), sizes)),
    )
    return single | shards


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(text.map("${}".format), inner, max_size=2)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(hashable, inner, max_size=4).map(lambda items: collections.defaultdict(None, items))
        | st.dictionaries(text, inner, max_size=4).map(lambda fields: members(argparse.Namespace(), fields))
        | st.dictionaries(text, inner, max_size=4).map(
            lambda fields: members(types.SimpleNamespace(), fields)
        )
        | st.builds(SavedDataclass, text, st.dictionaries(text, inner, max_size=4))
        | st.builds(
            SavedNamedTuple, text, st.dictionaries(text, inner, max_size=4).map(lambda f: tuple(f.items()))
        )
        | composite_tensors(inner)
        | st.builds(collections.deque, st.lists(inner, max_size=4), st.none() | st.integers(4, 9))
    )


sets = st.sets(hashable, max_size=4)
counters = st.dictionaries(text, st.integers(), max_size=4).map(collections.Counter)
leaves = scalars | sets | sets.map(frozenset) | counters | array_values
trees = st.recursive(leaves, containers, max_leaves=12)


def has_titles(dtype: Any) -> bool:
    fields = (dtype.fields or {}).values()
    inner = dtype.subdtype[0] if dtype.subdtype else None
    has_own = any(len(field) > 2 or has_titles(field[0]) for field in fields)
    return has_own or (inner is not None and has_titles(inner))


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
        {1: "int", "1": "str", (1, 2): None, None: 0, 1.5: []},
        *({"$tuple": [1]}, {"$unknown": 1, "x": 2}, {"": {}}),
        *(np.str_(""), np.str_("é"), np.float32(1.5), np.int64(-1), np.bool_(True)),
        *(np.array(7), np.zeros((0, 3)), np.arange(6, dtype=">i4").reshape(2, 3), np.array(["a", "bcd"])),
        np.datetime64("2026-11-21T12:00", "ms"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        *(set(), frozenset({frozenset({1}), 2}), collections.deque([1, 2], maxlen=2), collections.deque()),
        *(torch.float8_e4m3fn, torch.device("meta"), torch.Size([]), torch.sparse_coo, torch.channels_last),
        *(fractions.Fraction(-22, 7), fractions.Fraction(2**100, 3), datetime.time(1, 2, 3, 4)),
        *(np.dtype(">i2"), np.dtype([("a", "u1"), ("b", "f8", (2,))]), np.dtype("M8[ms]")),
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
        (collections.defaultdict(list), "a defaultdict, whose default_factory cannot be saved"),
        (closed_file(), "a closed io.BytesIO"),
        (decimal.Decimal("9" * 4097), "a Decimal of 4097 characters"),
        (torch.zeros(1), "Tensor"),
        (memoryview(b"x"), "memoryview"),
        (datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")), "rules of a time zone"),
        (datetime.datetime(2026, 10, 25, 2, 30, fold=1), "fold=1"),
        (np.array([object()]), "numpy dtype object"),
        (np.zeros(1, dtype=[("a", "O")]), "numpy dtype"),
        (np.dtype("O"), "numpy dtype object"),
        (np.zeros(1, dtype=[(("title", "a"), "i4")]), "fields with titles"),
        (np.zeros(1, dtype=[("a", "i4")]).view(np.recarray)[0], "Records"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        ("\udcff", "not valid Unicode"),
        (pathlib.PurePosixPath("a\udcff"), "not valid Unicode"),
        (1 << 9000, "9001 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else "value",
)
def test_the_error_has_the_path_of_a_refused_value(value: Any, word: str) -> None:
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


class Table(dict[str, int]):
    """A dict of the program's own kind, as configurations often are."""


class Own:
    """An object without a form that could be saved."""


class Config:
    def to_dict(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (np.array([object()]), "tolist()"),
        (np.array(["a"], dtype=np.dtypes.StringDType()), 'astype("U")'),
        (np.zeros(1, dtype=[("a", "i4")]).view(np.recarray), "view("),
        (np.ma.masked_array([1]), ".mask"),
        (np.random.PCG64(1), "numpy.random.Generator"),
        (1 << 9000, "hex(value)"),
        (decimal.Decimal("9" * 5000), "str(value)"),
        (datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")), "astimezone(datetime.timezone.utc)"),
        (functools.reduce(lambda inner, _: [inner], range(400), [0]), "flat list"),
        ({torch.tensor(1): 2}, "item()"),
        (Table(a=1), "Save dict() of it, and make a Table of that again"),
        (collections.UserDict(), "Save dict() of it"),
        ({}.keys(), "Save list() of it"),
        (Config(), "the dict that its .to_dict() returns"),
        (lambda: None, "Save its name as text"),
        (collections.OrderedDict, "Save its name as text"),
        (functools.partial(print, 1), "Save its arguments"),
        (iter([1]), "Save the position"),
        (re.compile("a"), ".pattern"),
        (io.StringIO(), "getvalue()"),
        (threading.Lock(), "create it again"),
        (re, "create it again"),
        (ValueError("x"), "create it again"),
        (..., "Save it as text or numbers"),
        (ipaddress.ip_address("::1"), "Save it as text or numbers"),
        (torch.zeros(2).untyped_storage(), "set_(storage)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "value",
)
def test_the_error_of_a_refused_value_has_a_fix(value: Any, advice: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode({"a": value}, "state")
    assert "Nothing was written" in str(caught.value)
    assert advice in str(caught.value)


def test_only_a_class_of_the_program_is_asked_for_methods() -> None:
    """Nobody can add state_dict() to an object of Python, numpy or torch."""
    assert "Add state_dict()" in advice_for(Own())
    for value in (object(), ..., torch.iinfo(torch.int8), np.finfo(np.float32), string.Template("x")):
        assert "Add state_dict()" not in advice_for(value)


def test_the_error_has_the_path_of_a_refused_key() -> None:
    for key in (object(), "\udcff"):
        with pytest.raises(InvalidInput, match=r"^state\.a\.<key ") as caught:
            encode({"a": {key: 1}}, "state")
        assert "key" in str(caught.value.key)


def test_numpy_extension_dtypes_are_refused() -> None:
    """A dtype that numpy itself does not name, such as ml_dtypes' bfloat16, would come back as raw bytes."""
    foreign = types.SimpleNamespace(hasobject=False, names=None, kind="V", str="<V2")
    with pytest.raises(InvalidInput, match="text of a fixed length"):
        encode_numpy(types.SimpleNamespace(dtype=foreign), "a")


def test_cycles_and_deep_nesting_are_refused() -> None:
    """Written values can be read back: the limit is the reader's."""
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


def fields(*rows: list[Any], itemsize: int = 4) -> dict[str, Any]:
    """The fields of a structured dtype."""
    return {"itemsize": itemsize, "fields": list(rows)}


def nested_fields(depth: int) -> Any:
    return fields(["a", nested_fields(depth - 1), 0, []]) if depth else "<f4"


REF = {"$tensor": "t"}
COO = {"indices": REF, "values": REF}
SIZES = {"shape": [2], "offsets": [0], "sizes": [1]}
DAMAGED: dict[str, list[Any]] = {
    "$int": ["1" * 3000, 5],
    "$float": [[]],
    # Integers with one hash, of which a set would take quadratic time.
    "$set": [
        *([[1]], [{"$decimal": "sNaN"}], [{"$dataclass": ["m:C", {}]}]),
        [{"$int": str(i * (2**61 - 1))} for i in range(4000)],
    ],
    "$dict": [[[1]], [[[], 1]]],
    "$range": [[1, 2, 0], "abc"],
    "$deque": [[-1, []], [10**30, []]],
    "$date": [1],
    "$time": ["noon", 1],
    "$timedelta": [[10**18, 0, 0]],
    # Python objects are not made from the bytes of a forged document.
    "$ndarray": [["|O", [1], "AAAAAAAAAAA="], ["<U0", [10**9], ""], ["<f4", [2], ""], ["<f4,<f4", [0], ""]],
    "$torch": [["device", "no"], ["size", ["1"]]],
    "$path": [1],
    "$purepath": [["mac", "x"], "x"],
    "$bytesio": [["AA==", -1], ["AA==", 10**30], ["AA=="]],
    "$decimal": [" 1", "1_0", "x", "9" * 4097, 1],
    "$uuid": ["x", "{12345678-1234-5678-1234-567812345678}", "12345678123456781234567812345678"],
    "$slice": [[1, 2], "123"],
    "$fraction": [[1, 0], [2, 4], [1, "2"], [True, {"$tuple": []}]],
    "$npdtype": ["|O", 1, fields(["a", "|O", 0, []])],
    "$entry": [1],
    "$enum": [["m:E"], ["m:E", 1], ["m" * 2000, "A"]],
    "$namedtuple": [["m:P", {"x": 1}], ["m:P", [["x"]]], ["m:P", [["x", 1], ["x", 2]]]],
    "$dataclass": [["m:C", [["x", 1]]], [1, {}]],
    "$defaultdict": [{"a": 1}],
    "$namespace": [[1]],
    "$simplenamespace": [None],
    "$structured": [
        [fields(["a", "<f4", 0, []]), [2], ""],
        *([fields(["a", kind, 0, []]), [1], "AAAAAA=="] for kind in ("|O", "<f8")),
        [fields(["a", "<f4", -1, []]), [1], "AAAAAA=="],
        [fields(itemsize=10**15), [1], ""],
        [fields(["a", "<f4", 0, [10**12]]), [0], ""],
        *([kind, [1], "AAAAAA=="] for kind in ({"itemsize": 4}, "<f4", nested_fields(40))),
    ],
    "$composite": [
        None,
        *(["m:C", {"a": REF}], [1, {"a": REF}, {}], ["m" * 2000 + ":C", {"a": REF}, {}]),
        *(["m:C", inner, {}] for inner in ({}, {"": REF}, {str(i): REF for i in range(65)})),
        *(["m:C", inner, {}] for inner in ([REF], {"a": 1}, {"a": [REF]})),
        *(["m:C", {"a": REF}, facts] for facts in ([], None)),
        ["sparse_coo", {"values": REF, "indices": REF}, {"size": [1], "coalesced": True}],
        ["sparse_coo", COO, {"size": [1]}],
        *(["sparse_coo", COO, {"size": n, "coalesced": True}] for n in ([-1], [2**53], [1] * 65, [1.0])),
        ["sparse_csr", {"crow_indices": REF, "values": REF}, {"size": [1, 1]}],
        ["dtype", {"raw": REF, "more": REF}, {"dtype": "complex128"}],
        *(["dtype", {"raw": REF}, facts] for facts in ({"dtype": 5}, {})),
        ["dtensor", {"local": REF, "more": REF}, SIZES],
        ["dtensor", {"local": REF}, {**SIZES, "sizes": None}],
    ],
}


@pytest.mark.parametrize(
    ("tag", "body"),
    [(tag, body) for tag, bodies in DAMAGED.items() for body in bodies],
    ids=lambda value: str(value)[:40],
)
def test_invalid_bodies_of_tags_are_corrupt(tag: str, body: Any) -> None:
    with pytest.raises(Corrupt, match="cannot be decoded"):
        decode({tag: body})


@pytest.mark.parametrize("text", ["NaN", "-NaN", "sNaN", "NaN123"])
def test_decimals_that_are_no_numbers_round_trip(text: str) -> None:
    assert str(through_json(decimal.Decimal(text))) == text


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": [{"$quaternion": [1, 2, 3, 4]}]}, r"\$quaternion"),
        ({"$composite": ["sparse_new", {"a": REF}, {}]}, "sparse_new"),
        ({"$composite": ["", {"a": REF}, {}]}, "''"),
        ({"$composite": ["dtype", {"raw": REF}, {"dtype": "complex999"}]}, "complex999"),
    ],
)
def test_values_of_a_newer_version_are_unsupported(value: Any, match: str) -> None:
    with pytest.raises(Unsupported, match=f"{match}.*newer"):
        decode(value)


@pytest.mark.parametrize(
    "dtype",
    [
        [("a", "<i4"), ("b", ">f8", (2,))],
        [("a", "i1"), ("inner", [("x", "U3"), ("y", "M8[ms]")])],
        {"names": ["late", "early"], "formats": ["i2", "i2"], "offsets": [6, 1], "itemsize": 12},
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
    ],
    ids=str,
)
def test_structured_arrays_and_scalars_round_trip(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)
    array.view(np.uint8)[...] = 0 if "inner" in (array.dtype.names or ()) else 7
    assert same(through_json(array), array)
    assert same(through_json(array[1, 2]), array[1, 2])
    assert same(through_json(array[:0]), array[:0])


def test_a_type_is_only_text_for_a_reader() -> None:
    """Nothing is imported: neither the module nor the class needs to exist."""
    found = through_json({"a": SavedEnum("no.such.module:Phase", "WARM")})
    assert found == {"a": SavedEnum("no.such.module:Phase", "WARM")}
