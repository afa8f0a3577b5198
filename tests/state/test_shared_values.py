"""Values that are one object, or share memory, in the live state, and were saved apart or together."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.checkpoint.state import State
from holdfast.checkpoint.state.tensors import FilledMemory, holds, range_of
from state.trip import kept


@dataclasses.dataclass
class Best:
    """Value of a metric."""

    value: float = 0.0


MAKERS: dict[str, Callable[[float], Any]] = {
    "list": lambda number: [number],
    "nested": lambda number: {"a": ([number], "same")},
    "deque": lambda number: collections.deque([number], 4),
    "set": lambda number: {number},
    "bytearray": lambda number: bytearray([int(number)]),
    "dataclass": Best,
    "array": lambda number: np.full(3, number),
    "tensor": lambda number: torch.full((3,), number),
    "NaN": lambda number: [float("nan"), number],
}


def equal(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("kind", MAKERS)
def test_values_that_were_apart_stay_apart(kind: str) -> None:
    make = MAKERS[kind]
    saved = kept({"best": {"x": make(1.0), "y": make(2.0)}, "last": make(3.0)})
    shared = make(0.0)
    state: dict[str, Any] = {"best": {"x": shared, "y": shared}, "last": shared}
    saved.restore(State(state))
    found = [state["best"]["x"], state["best"]["y"], state["last"]]
    assert equal(found, [make(1.0), make(2.0), make(3.0)])
    assert sum(one is shared for one in found) == 1, "one is changed in place"


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "NaN"])
def test_values_that_were_one_object_stay_one(kind: str) -> None:
    make, saved_one = MAKERS[kind], MAKERS[kind](1.0)
    saved = kept({"best": {"x": saved_one, "y": saved_one}})
    shared = make(0.0)
    state: dict[str, Any] = {"best": {"x": shared, "y": shared}}
    saved.restore(State(state))
    assert state["best"]["x"] is state["best"]["y"] is shared
    assert equal(shared, make(1.0))


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_views_that_overlap_are_apart_if_their_values_differ(kind: str) -> None:
    make = torch.tensor if kind == "tensor" else np.array
    saved = kept({"views": {"a": make([1.0, 1.0]), "b": make([2.0, 2.0])}})
    memory = make([0.0, 0.0, 0.0])
    state: dict[str, Any] = {"views": {"a": memory[:2], "b": memory[1:]}}
    saved.restore(State(state))
    assert state["views"]["a"].tolist() == [1.0, 1.0]
    assert state["views"]["b"].tolist() == [2.0, 2.0]


def test_views_of_one_buffer_remain_views_of_it() -> None:
    """The buffer is saved beside its views, in either order."""

    def build(values: torch.Tensor) -> dict[str, Any]:
        last = {"tail": values[2:], "mid": values[1:4]}
        return {"first": {"head": values[:3]}, "flat": values, "last": last}

    saved = kept(build(torch.arange(5.0)))
    state = build(torch.zeros(5))
    load = saved.restore(State(state))
    assert state["flat"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    state["flat"].fill_(7.0)
    assert state["first"]["head"].tolist() == [7.0] * 3
    assert state["last"]["tail"].tolist() == [7.0] * 3
    assert not load.notes


def test_a_tied_parameter_has_a_note_only_if_the_saved_values_differ() -> None:
    for value, num_notes in ((1.0, 0), (2.0, 1)):
        numbers = {"a": torch.ones(3), "b": torch.full((3,), value)}
        model = nn.ParameterDict({name: nn.Parameter(one) for name, one in numbers.items()})
        saved = kept({"model": model})
        one = nn.Parameter(torch.zeros(3))
        load = saved.restore(State({"model": nn.ParameterDict({"a": one, "b": one})}))
        assert len(load.notes) == num_notes
        assert one.tolist() == [value] * 3


RANGES = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(RANGES, max_size=12), RANGES)
def test_overlaps_are_the_addresses_added(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    memory = FilledMemory()
    for place in added:
        memory.add(*place)
    filled = {address for place in added for address in range(*place)}
    found = [address for place in memory.overlap(*asked) for address in range(*place)]
    assert found == sorted(filled.intersection(range(*asked)))


def test_memory_with_gaps_has_no_range() -> None:
    whole = torch.zeros(4, 6)
    assert range_of(whole) == (whole.data_ptr(), whole.data_ptr() + 96)
    assert range_of(whole.t()) == range_of(whole)
    for other in (whole[:, :3], torch.zeros(1).expand(4), torch.zeros(0), torch.zeros(2, device="meta")):
        assert range_of(other) is None


def test_bytes_are_compared_in_the_order_of_the_live_tensor() -> None:
    new = torch.arange(6.0).reshape(2, 3)
    live = new.t().contiguous().t()
    place = range_of(live)
    assert place is not None
    assert holds(live, new, [place])
    live[1, 0] = 9.0
    assert not holds(live, new, [place])
