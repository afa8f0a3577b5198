"""Composite tensors: subclasses over inner tensors, sparse tensors, dtypes that safetensors lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.format.composites import RAW_DTYPES, SavedTensor
from holdfast.checkpoint.state import State
from holdfast.errors import Corrupt, InvalidInput, Unsupported
from state.trip import Kept, Stateful, kept, step_once
from wrapped import Grid, Momentum, Rounding, coded, same_coded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "hybrid": lambda dense: dense.to_sparse(1),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 1)),
    "bsc": lambda dense: dense.to_sparse_bsc((1, 2)),
}
FEW, MANY = torch.eye(4), torch.arange(16.0).reshape(4, 4)
RAW = sorted(name for name in RAW_DTYPES if hasattr(torch, name))


def raw(name: str, seed: int) -> torch.Tensor:
    """Random bytes as a tensor of a dtype that safetensors lacks."""
    stored, count = RAW_DTYPES[name]
    kinds = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "F64": torch.float64}
    draw = torch.Generator().manual_seed(seed)
    item_bytes = kinds[stored].itemsize * count
    found = torch.randint(0, 256, (6 * item_bytes,), dtype=torch.uint8, generator=draw)
    if count > 1:
        return torch.view_as_complex(found.view(kinds[stored]).reshape(2, 3, count))
    return found.view(kinds[stored]).reshape(2, 3).view(getattr(torch, name))


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def same_sparse(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not b.layout or a.shape != b.shape or a.dtype is not b.dtype:
        return False
    if a.layout is torch.sparse_coo:
        parts = [(one._indices(), one._values()) for one in (a, b)]
        return a.is_coalesced() == b.is_coalesced() and all(map(torch.equal, *parts))
    of = ("ccol_indices", "row_indices") if "sc" in str(a.layout)[-2:] else ("crow_indices", "col_indices")
    return all(torch.equal(getattr(a, name)(), getattr(b, name)()) for name in (*of, "values"))


class Holder(nn.Module):
    """A module with one buffer beside a trained weight."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("extra", buffer)


@pytest.mark.parametrize("factor", [1.0, 1j], ids=["float32", "complex128"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_restored_with_their_number_of_elements(layout: str, factor: complex) -> None:
    """As buffer and as entry the same object, in a container a new one.

    The values of complex ones are composite tensors themselves, of another shape than the live ones.
    """
    make = LAYOUTS[layout]
    many, few = (one if factor == 1.0 else one.to(torch.complex128) * factor for one in (MANY, FEW))
    saved = kept({"m": Holder(make(many)), "x": make(many), "in": {"list": [make(many)]}})
    live: dict[str, Any] = {"m": Holder(make(few)), "x": make(few), "in": {"list": [make(few)]}}
    buffer, entry = live["m"].extra, live["x"]
    saved.restore(State(live))
    assert live["m"].extra is buffer
    assert live["x"] is entry
    for found in (buffer, entry, live["in"]["list"][0]):
        assert same_sparse(found, make(many))


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_whether_a_sparse_tensor_is_coalesced_is_kept(is_coalesced: bool) -> None:
    indices, values = torch.tensor([[2, 0, 2], [1, 0, 1]]), torch.tensor([1.0, 2.0, 3.0])
    tensor = torch.sparse_coo_tensor(indices, values, (3, 2))
    tensor = tensor.coalesce() if is_coalesced else tensor
    live: dict[str, Any] = {"x": torch.sparse_coo_tensor(indices, values * 0, (3, 2)), "in": [None]}
    kept({"x": tensor, "in": [tensor]}).restore(State(live))
    assert same_sparse(live["x"], tensor)
    assert same_sparse(live["in"][0], tensor)


@pytest.mark.parametrize("name", RAW)
def test_dtypes_that_safetensors_lacks_are_restored_bit_for_bit(name: str) -> None:
    """Also NaN with payloads. As buffer and as entry in the same memory."""
    saved = kept({"m": Holder(raw(name, 1)), "x": raw(name, 1), "in": [raw(name, 1)]})
    live: dict[str, Any] = {"m": Holder(raw(name, 2)), "x": raw(name, 2), "in": [raw(name, 2)]}
    before = {id(t): t.data_ptr() for t in (live["m"].extra, live["x"], live["in"][0])}
    saved.restore(State(live))
    found = (live["m"].extra, live["x"], live["in"][0])
    assert {id(t): t.data_ptr() for t in found} == before
    assert {bytes_of(one) for one in found} == {bytes_of(raw(name, 1))}
    assert {one.dtype for one in found} == {getattr(torch, name)}


def test_a_complex_parameter_is_trained_and_resumed_bit_for_bit() -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        return {"w": weight, "o": torch.optim.Adam([weight], lr=0.1)}

    def train(objects: dict[str, Any]) -> None:
        for _ in range(3):
            objects["w"].grad = torch.randn(3, dtype=torch.complex128)
            objects["o"].step()

    first = make()
    train(first)
    saved = kept(first)
    second = make()
    saved.restore(State(second))
    train(first)
    torch.manual_seed(0)
    saved.restore(State(second))
    train(second)
    assert bytes_of(second["w"].detach()) == bytes_of(first["w"].detach())
    assert kept(second).text == kept(first).text


def quantized(seed: int, grid: Grid | None = None) -> nn.Module:
    """A layer whose weight is a subclass."""
    torch.manual_seed(seed)
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(coded(seed=seed, grid=grid), requires_grad=False)
    return layer


def test_a_subclass_is_filled_in_place_wherever_it_is() -> None:
    def make(seed: int) -> dict[str, Any]:
        return {"m": quantized(seed), "x": coded(seed=seed), "in": {"a": [coded(seed=seed)]}}

    saved, live = kept(make(1)), make(2)
    before = [live["m"].weight, live["x"], live["in"]["a"][0]]
    load = saved.restore(State(live))
    assert (load.missing, load.unexpected, load.notes) == ([], [], [])
    found = [live["m"].weight, live["x"], live["in"]["a"][0]]
    assert all(one is other for one, other in zip(found, before, strict=True))
    assert all(same_coded(one.detach(), coded(seed=1)) for one in found)


def test_state_that_an_optimizer_makes_at_its_first_step_is_restored_before_it() -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(3)
        layer = nn.Linear(3, 4, bias=False)
        return {"model": layer, "optimizer": Momentum(layer.parameters())}

    def train(objects: dict[str, Any], steps: int) -> None:
        for step in range(steps):
            objects["model"].weight.grad = torch.full((4, 3), 0.1 * step) + objects["model"].weight.detach()
            objects["optimizer"].step()

    first = make()
    train(first, 3)
    saved = kept(first)
    train(first, 2)
    for steps_before in (0, 1):
        second = make()
        train(second, steps_before)
        saved.restore(State(second))
        assert kept(second).text == saved.text
        train(second, 2)
        assert torch.equal(second["model"].weight, first["model"].weight)
        states = [one["optimizer"].state[one["model"].weight] for one in (first, second)]
        assert same_coded(states[1]["momentum"], states[0]["momentum"])
        assert states[1]["count"] == states[0]["count"] == 5


def test_an_optimizer_without_such_state_refuses_it() -> None:
    layer = nn.Linear(3, 4, bias=False)
    optimizer = step_once(Momentum(layer.parameters()))
    saved = kept({"model": layer, "optimizer": optimizer})
    other = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1)}
    with pytest.raises(InvalidInput, match=r"momentum was saved as a wrapped.Coded.*take one step"):
        saved.plan(State(other))


@pytest.mark.parametrize(
    ("live", "why"),
    [
        (torch.zeros(4, 3), "is a plain torch.float32 tensor"),
        (coded(rows=5), "description"),
        (coded(grid=Grid(0.25)), "description"),
        (coded(grid=Grid(rounding=Rounding.DOWN)), "description"),
        (torch.eye(4).to_sparse(), "sparse_coo"),
        (torch.zeros(4, 3, dtype=torch.complex128), "complex128"),
    ],
)
def test_another_class_or_description_is_refused(live: torch.Tensor, why: str) -> None:
    """Before anything is changed: as entry, as buffer and in a container."""
    saved = kept({"x": coded(), "m": Holder(coded()), "in": [coded()]})
    good: dict[str, Any] = {"x": coded(seed=5), "m": Holder(coded(seed=5)), "in": [coded(seed=5)]}
    for key, wrong in (("x", live), ("m", Holder(live)), ("in", [live])):
        objects = {**good, key: wrong}
        with pytest.raises(InvalidInput, match=why):
            saved.plan(State(objects))
    saved.restore(State(good))
    assert same_coded(good["x"], coded())


def test_a_plain_tensor_is_not_restored_into_a_subclass() -> None:
    saved = kept({"x": torch.zeros(4, 3)})
    with pytest.raises(Unsupported, match=r"saved as a plain tensor, but is a wrapped.Coded"):
        saved.plan(State({"x": coded()}))


def test_without_live_objects_inner_tensors_are_read() -> None:
    """Kinds of torch's own are rebuilt; of a subclass there is the description."""
    saved = kept({"m": quantized(1), "x": MANY.to_sparse_csr(), "c": [raw("complex128", 1)]})
    found: dict[str, Any] = {}
    state = State(found)
    load = saved.fill(state.load_new(saved.specs, saved.tied, saved.values))
    load.finish()
    assert same_sparse(found["x"], MANY.to_sparse_csr())
    assert bytes_of(found["c"][0]) == bytes_of(raw("complex128", 1))
    weight = found["m"]["weight"]
    assert isinstance(weight, SavedTensor)
    assert weight.type == "wrapped:Coded"
    assert torch.equal(weight.inner["codes"], coded(seed=1).codes)


def test_an_object_receives_a_new_tensor_of_its_class() -> None:
    before = coded(seed=2)
    live = Stateful({"tensor": before})
    kept({"h": Stateful({"tensor": coded(seed=1)})}).restore(State({"h": live}))
    assert same_coded(live.state["tensor"], coded(seed=1))
    assert same_coded(before, coded(seed=2))


def test_tied_subclasses_are_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.a, self.b = quantized(seed), quantized(seed)
            self.b.register_parameter("weight", self.a.get_parameter("weight"))

    saved, live = kept({"m": Tied(1)}), Tied(2)
    assert [name for name in saved.tensors if name.endswith("codes")] == ["m.a.weight.codes"]
    saved.restore(State({"m": live}))
    assert live.a.get_parameter("weight") is live.b.get_parameter("weight")
    assert same_coded(live.b.get_parameter("weight").detach(), coded(seed=1))


def test_a_quantized_weight_without_an_optimizer_is_frozen_and_a_trained_one_owned() -> None:
    layer, trained = quantized(1), nn.Linear(3, 4)
    trained.weight = nn.Parameter(coded(seed=2), requires_grad=False)
    optimizer = torch.optim.SGD([trained.weight, trained.bias], lr=0.1)
    state = State({"layer": layer, "trained": trained, "o": optimizer})
    captured = state.capture()
    assert captured.structure.frozen == {"layer.weight.codes", "layer.weight.scale", "layer.bias"}
    assert captured.structure.owned == {"trained.weight.codes", "trained.weight.scale", "trained.bias"}
    assert state.capture().structure is captured.structure


def test_a_tensor_that_becomes_sparse_is_restored_as_such() -> None:
    """Also in the state of an optimizer, before its first step and after it."""

    def make(tensor: torch.Tensor, *, has_stepped: bool = True) -> dict[str, Any]:
        parameter = nn.Parameter(torch.zeros(4, 4))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        if has_stepped:
            optimizer.state[parameter] = {"mask": tensor.clone()}
        return {"m": Holder(tensor.clone()), "x": [tensor.clone()], "p": parameter, "o": optimizer}

    def tensors_of(live: dict[str, Any]) -> list[torch.Tensor]:
        return [live["m"].extra, live["x"][0], live["o"].state[live["p"]]["mask"]]

    live = make(MANY)
    state = State(live)
    state.capture()
    live["m"].extra, live["x"][0] = MANY.to_sparse_csr(), MANY.to_sparse_csr()
    live["o"].state[live["p"]]["mask"] = MANY.to_sparse_csr()
    saved = Kept(state.capture())
    for has_stepped in (False, True):
        other = make(FEW.to_sparse_csr(), has_stepped=has_stepped)
        saved.restore(State(other))
        assert all(same_sparse(one, MANY.to_sparse_csr()) for one in tensors_of(other))


def test_what_cannot_be_taken_apart_is_refused_with_the_reason() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(Unsupported, match=r"x.a cannot be saved: .*values\(\) and offsets\(\)"):
        State({"x": {"a": jagged}})
    conjugate = torch.zeros(2, dtype=torch.complex128).conj()
    with pytest.raises(Unsupported, match=r"x cannot be saved: .*resolve_conj\(\)"):
        State({"x": conjugate})
    holds_object = coded()
    holds_object.grid = object()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidInput, match=r"<context>.*cannot be saved|cannot be saved"):
        State({"x": holds_object})


def test_damaged_inner_tensors_of_a_sparse_one_are_corrupt() -> None:
    saved = kept({"in": [MANY.to_sparse_csr()]})
    saved.tensors["in.0.col_indices"] += 100
    load = saved.fill(saved.plan(State({"in": [None]})))
    with pytest.raises(Corrupt, match="sparse_csr"):
        load.finish()
