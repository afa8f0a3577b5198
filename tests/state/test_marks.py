"""Marks of a state differ once training has changed it, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state import State
from state.trip import assign, kept


class Setup:
    """A model, plain tensors and a number, without an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.loose = torch.ones(5)
        self.waves = torch.randn(3, dtype=torch.complex64)
        with torch.inference_mode():
            self.inferred = torch.ones(2)
        self.objects: dict[str, Any] = {
            "model": self.model,
            "loose": {"a": self.loose, "w": self.waves},
            "inferred": self.inferred,
            "epoch": 1,
        }
        self.state = State(self.objects)


def _nothing(setup: Setup) -> None:
    setup.model[0](torch.randn(3, 4))
    setup.state.capture()
    gc.collect()


def _replace_twice(setup: Setup) -> None:
    """The allocator hands the first memory out again, if nothing holds it."""
    size = setup.model[0].weight.shape
    for value in (1.0, 2.0):
        setup.model[0].weight = nn.Parameter(torch.full(size, value))


CHANGES: dict[str, Callable[[Setup], object]] = {
    "write": lambda setup: setup.model[2].bias.detach().add_(1),
    "write loose": lambda setup: setup.loose[2].fill_(7),
    "write through a view": lambda setup: setup.model[0].weight.detach().view(-1)[3].fill_(4),
    "replace parameter": lambda setup: assign(setup.model[0], bias=nn.Parameter(torch.zeros(8))),
    "set data": lambda setup: assign(setup.model[0].bias, data=torch.zeros(8)),
    "replace twice": _replace_twice,
    "set to another storage": lambda s: s.model[1].running_mean.set_(s.model[1].running_mean.flip(0)),
    "change strides": lambda s: assign(s.model[2].weight, data=s.model[2].weight.data.reshape(8, 2).t()),
    "reread": lambda setup: assign(setup.waves, data=setup.waves.conj()),
    "reinterpret": lambda s: assign(s.model[1].running_var, data=s.model[1].running_var.view(torch.int32)),
    "train a batch": lambda setup: setup.model(torch.randn(3, 4)),
    "count": lambda setup: setup.objects.update(epoch=2),
    "replace inferred": lambda setup: setup.objects.update(inferred=setup.inferred.clone()),
    "add a layer": lambda setup: setup.model.append(nn.Linear(2, 2)),
}


def test_the_marks_of_an_unchanged_state_are_equal() -> None:
    setup = Setup()
    before = setup.state.marks()
    for _ in range(3):
        _nothing(setup)
        assert setup.state.marks() == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_another_mark(change: str) -> None:
    setup = Setup()
    before = setup.state.marks()
    CHANGES[change](setup)
    assert setup.state.marks() != before


def test_a_change_that_is_undone_still_has_another_mark() -> None:
    setup = Setup()
    before, bias = setup.state.marks(), setup.model[0].bias
    setup.model[0].bias = nn.Parameter(torch.zeros(8))
    setup.state.marks()
    setup.model[0].bias = bias
    assert setup.state.marks() != before


def test_no_new_tensor_has_the_address_of_a_marked_one() -> None:
    """The memory of a replaced tensor is in use until the next mark, and free after it."""
    setup = Setup()
    setup.objects["big"] = torch.zeros(1 << 20)
    before, address = setup.state.marks(), setup.objects["big"].data_ptr()
    old = weakref.ref(setup.objects["big"].untyped_storage())
    del setup.objects["big"]
    gc.collect()
    assert torch.zeros(1 << 20).data_ptr() != address
    assert setup.state.marks() != before
    assert old() is None


def test_a_load_releases_the_memory_of_marked_tensors() -> None:
    setup = Setup()
    checkpoint = kept(setup.objects)
    setup.objects["big"] = torch.zeros(1 << 20)
    before = setup.state.marks()
    old = weakref.ref(setup.objects["big"].untyped_storage())
    del setup.objects["big"]
    checkpoint.plan(setup.state)
    gc.collect()
    assert old() is None
    assert setup.state.marks() != before


def test_a_write_through_another_object_of_the_same_memory_has_another_mark() -> None:
    """As after `module.buffer = module.buffer.data`: each object has a counter of writes of its own."""
    values = {"w": torch.zeros(3)}
    state = State({"values": values})
    state.marks()
    values["w"] = values["w"].data
    before = state.marks()
    values["w"].add_(1)
    assert state.marks() != before


def test_a_state_that_cannot_be_saved_yet_counts_as_changed() -> None:
    """A module on the meta device that the first step makes real."""
    state = State({"model": torch.nn.Linear(2, 2, device="meta")})
    assert state.marks() != state.marks()
