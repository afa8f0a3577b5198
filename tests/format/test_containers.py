"""Kinds of containers: what every walk over nested values relies on."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.format.nesting import plain_form, prune
from holdfast.checkpoint.format.values import SavedDataclass, SavedNamedTuple, TensorRef, decode, encode


class Pair(NamedTuple):
    """A named tuple of a program."""

    a: Any
    b: Any


@dataclasses.dataclass
class Settings:
    """A dataclass of a program."""

    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen one."""

    a: Any
    b: Any


IN_DOCUMENTS: dict[str, Any] = {
    "dict": {"a": 1, "b": 2},
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(None, {"a": 1, "b": 2}),
    "list": [1, 2],
    "tuple": (1, 2),
    "deque": collections.deque([1, 2], maxlen=3),
    "namespace": argparse.Namespace(a=1, b=2),
    "simple": types.SimpleNamespace(a=1, b=2),
    "saved tuple": SavedNamedTuple("m:Pair", (("a", 1), ("b", 2))),
    "saved dataclass": SavedDataclass("m:Settings", {"a": 1, "b": 2}),
}
LIVE: dict[str, Any] = {"named tuple": Pair(1, 2), "dataclass": Settings(1, 2), "frozen": Frozen(1, 2)}
OTHERS: dict[str, Any] = {
    "counter": collections.Counter(a=1, b=2),
    "composite": SavedTensor("m:C", {"a": TensorRef("t")}, {"shape": [1]}),
}


@pytest.mark.parametrize(
    "value", [*IN_DOCUMENTS.values(), *LIVE.values(), *OTHERS.values()], ids=lambda v: str(type(v))
)
def test_a_container_is_rebuilt_from_its_items(value: Any) -> None:
    kind = kind_of(value)
    assert kind is not None
    pairs = kind.items(value)
    new = kind.rebuild(value, pairs)
    assert new is not value
    assert (type(new), new, kind.items(new)) == (type(value), value, pairs)
    assert getattr(new, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize("value", [*IN_DOCUMENTS.values(), *LIVE.values()], ids=lambda v: str(type(v)))
def test_a_container_that_can_change_takes_other_items(value: Any) -> None:
    """The others are those whose items are fixed: tuples, frozen dataclasses and saved forms."""
    kind = kind_of(value)
    assert kind is not None
    is_fixed = isinstance(value, (tuple, SavedNamedTuple, SavedDataclass, Frozen))
    assert (kind.refill is None) is is_fixed
    new = kind.rebuild(value, kind.items(value))
    if kind.refill is not None:
        kind.refill(new, [(step, 10 * item) for step, item in kind.items(value)])
        assert kind.items(new) == [(step, 10 * item) for step, item in kind.items(value)]


@pytest.mark.parametrize("name", IN_DOCUMENTS)
def test_a_container_of_a_document_is_plain_for_readers(name: str) -> None:
    """It survives a document, and a reader without the program gets dicts, lists and tuples."""
    value = decode(encode(IN_DOCUMENTS[name], "value"))
    plain = plain_form(value)
    assert type(plain) in (dict, collections.OrderedDict, list, tuple)
    assert list(plain.values() if isinstance(plain, dict) else plain) == [1, 2]


@pytest.mark.parametrize("name", IN_DOCUMENTS)
def test_a_reference_that_is_left_out_leaves_its_container(name: str) -> None:
    """The container stays of its type, and keeps its other items."""
    kind = kind_of(IN_DOCUMENTS[name])
    assert kind is not None
    steps = [step for step, _ in kind.items(IN_DOCUMENTS[name])]
    held = kind.rebuild(IN_DOCUMENTS[name], [(steps[0], TensorRef("x")), (steps[1], TensorRef("y"))])
    found = prune({"value": held}, ["y"])["value"]
    assert type(found) is type(held)
    assert [item for _, item in kind.items(found)] == [TensorRef("y")]


@pytest.mark.parametrize("value", [1, "text", {1}, frozenset({1}), b"", Settings, TensorRef("x"), range(2)])
def test_other_values_are_no_containers(value: Any) -> None:
    assert kind_of(value) is None
