"""Tensors, generators, plain values and containers, and refused values."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR, StepLR

from holdfast.checkpoint.format.manifest import Tensor
from holdfast.checkpoint.format.values import decode, encode
from holdfast.checkpoint.state import State, per_rank, replicated
from holdfast.checkpoint.state.tensors import dtype_name, torch_dtype
from holdfast.errors import Corrupt, InvalidInput, Unsupported
from state.trip import Stateful, kept, same


class Listed(dict[str, Any]):
    """A mapping whose items are set one by one, and whose `update` means something else."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.assigned = [*getattr(self, "assigned", ()), key]
        super().__setitem__(key, value)

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("not here")


def test_plain_values_are_assigned_to_the_users_mapping_one_by_one() -> None:
    saved = {"epoch": 3, "loss": 0.5, "name": "x", "none": None, "pair": (1, 2), "blob": b"ab"}
    objects = Listed(epoch=0, loss=None, name="", none=4, pair=(), blob=b"")
    kept(saved).restore(State(objects))
    assert (dict(objects), sorted(objects.assigned)) == (saved, sorted(saved))


def test_later_changes_do_not_affect_captured_values() -> None:
    history = [1, {"a": [2]}]
    objects = {"history": history, "epoch": 1}
    state = State(objects)
    captured = state.capture()
    history[1]["a"].append(3)
    objects["epoch"] = 2
    assert captured.values["history"] == [1, {"a": [2]}]
    assert captured.values["epoch"] == 1
    assert state.capture().values["epoch"] == 2


def test_containers_are_updated_in_place() -> None:
    """References from elsewhere see the restored content; tensors in them stay the same objects."""

    def build(n: int) -> dict[str, Any]:
        return {
            "log": {
                "steps": [n, n + 1],
                "best": torch.full((2,), float(n)),
                "inner": {"x": n},
                "queue": collections.deque([n], maxlen=3),
                "seen": {n},
                "array": np.full(3, n),
                "pair": (torch.full((1,), float(n)), n),
                "bytes": bytearray(b"%d" % n),
                "odict": collections.OrderedDict(a=n),
            }
        }

    saved = kept(build(1))
    objects = build(2)
    log = objects["log"]
    log["steps"].append(99)
    log["gone"] = 5
    parts = {key: log[key] for key in log if key not in ("pair", "gone")}
    pair_tensor = log["pair"][0]
    saved.restore(State(objects))
    assert objects["log"] is log
    assert all(log[key] is part for key, part in parts.items())
    assert log["pair"][0] is pair_tensor
    assert repr(log) == repr(build(1)["log"])


def test_a_container_of_another_structure_is_replaced_where_it_differs() -> None:
    """Tensors of another shape are new ones."""
    saved = kept({"x": {"t": torch.ones(3), "list": [1, [2]], "new": {"deep": torch.zeros(1)}}})
    objects: dict[str, Any] = {"x": {"t": torch.zeros(2), "list": 5}}
    saved.restore(State(objects))
    assert objects["x"]["t"].tolist() == [1.0] * 3
    assert objects["x"]["list"] == [1, [2]]
    assert objects["x"]["new"]["deep"].tolist() == [0.0]


def test_plain_tensors_are_filled_in_place() -> None:
    """A top-level tensor keeps its identity, whatever its layout."""
    saved = kept({"t": torch.arange(6.0).reshape(2, 3), "p": nn.Parameter(torch.ones(2))})
    tensor, parameter = torch.zeros(3, 2).t(), nn.Parameter(torch.zeros(2))
    objects = {"t": tensor, "p": parameter}
    saved.restore(State(objects))
    assert objects["t"] is tensor
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert parameter.tolist() == [1, 1]
    assert parameter.requires_grad


def test_generators_resume() -> None:

    def build(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "torch": generator,
            "python": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "twister": np.random.Generator(np.random.MT19937(seed)),
            "legacy": np.random.RandomState(seed),
        }

    def draw(g: dict[str, Any]) -> list[float]:
        numbers = [g["python"].gauss(0, 1), g["numpy"].normal(), g["twister"].random(), g["legacy"].randn()]
        return [*numbers, torch.rand(1, generator=g["torch"]).item()]

    objects = build(1)
    draw(objects)
    saved = kept(objects)
    expected = [draw(objects), draw(objects)]
    objects2 = build(2)
    saved.restore(State(objects2))
    assert [draw(objects2), draw(objects2)] == expected


KINDS: dict[str, Any] = {
    "torch": torch.Generator(),
    "python": random.Random(1),
    "pcg64": np.random.default_rng(1),
    "philox": np.random.Generator(np.random.Philox(1)),
    "legacy": np.random.RandomState(1),
}


@pytest.mark.parametrize("live", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_a_generator_of_another_kind_is_refused_before_anything_changes(saved: str, live: str) -> None:
    content = kept({"a": torch.ones(2), "g": KINDS[saved]})
    state = {"a": torch.zeros(2), "g": KINDS[live]}
    if saved == live:
        content.restore(State(state))
        assert state["a"].tolist() == [1, 1]
        return
    with pytest.raises(InvalidInput, match=r"does not fit it: .* Nothing was changed"):
        content.restore(State(state))
    assert state["a"].tolist() == [0, 0]


@pytest.fixture
def numpy_random() -> Iterator[Any]:
    """`numpy.random`, whose global generator is put back after the test."""
    numpy: Any = np.random  # stubs of numpy lack these functions
    before = numpy.get_bit_generator()
    yield numpy
    numpy.set_bit_generator(before)


class OtherBits(np.random.PCG64):
    """Bit generator of a library."""


@pytest.mark.parametrize(
    ("saved", "live", "is_restored"),
    [
        (np.random.PCG64, np.random.MT19937, True),
        (OtherBits, OtherBits, True),
        (OtherBits, np.random.MT19937, False),
    ],
)
def test_numpy_s_own_generator_becomes_the_saved_kind(
    numpy_random: Any, saved: Any, live: Any, is_restored: bool
) -> None:
    numpy_random.set_bit_generator(saved(3))
    checkpoint = kept({"x": torch.ones(1)})
    expected = _draw()
    numpy_random.set_bit_generator(live(4))
    load = checkpoint.restore(State({"x": torch.ones(1)}))
    assert (_draw() == expected) is is_restored
    assert type(numpy_random.get_bit_generator()) is (saved if is_restored else live)
    assert len(load.generator_notes) == (not is_restored)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rng: rng.update(numpy={"bit_generator": "PCG64", "state": {}}),
        lambda rng: rng["python"].update(words=b"123"),
        lambda rng: rng["python"].update(version="x"),
        lambda rng: rng["numpy"].update(state=5),
        lambda rng: rng.pop("python"),
        lambda rng: rng.update(seed="7"),
        lambda rng: rng.update(torch=4),
    ],
)
def test_damaged_states_of_generators_are_found_before_a_change(damage: Callable[[Any], object]) -> None:
    saved = kept({"x": torch.ones(1)})
    decoded = decode(saved.values["rng"])
    damage(decoded)
    saved.values["rng"] = encode(decoded, "rng")
    state = {"x": torch.zeros(1)}
    with pytest.raises(Corrupt, match="rng: a saved state of a random number generator"):
        saved.restore(State(state))
    assert state["x"].item() == 0


def _replace(path: str, value: Any) -> Callable[[Any], object]:
    """Return a function that replaces a value by key path; None removes it."""
    *steps, last = path.split(".")

    def damage(values: Any) -> None:
        for step in steps:
            values = values[int(step) if step.isdigit() else step]
        values[last] = value
        if value is None:
            del values[last]

    return damage


class _WithExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"n": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"n": 1}


@pytest.mark.parametrize(
    "damage",
    [
        _replace("optimizer.state", None),
        _replace("optimizer.state", []),
        _replace("optimizer.state", 5),
        _replace("optimizer.state", {"model.weight": 5}),
        _replace("optimizer.shared", [1]),
        _replace("optimizer.param_groups.0.lr", {"$tensor": "nosuch"}),
        _replace("optimizer.param_groups.0.lr", {"$torch": ["dtype", None]}),
        _replace("model.extra_state", 5),
        _replace("model.extra_state", [1]),
        _replace("value", {"$tensor": "nosuch"}),
        _replace("value", {"$ndarray": ["<f8", [1], "AAAA"]}),
        _replace("value", {"$npdtype": ["", 1]}),
    ],
)
def test_values_that_no_save_writes_count_as_damage(damage: Callable[[Any], object]) -> None:
    def build() -> dict[str, Any]:
        model = _WithExtra(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "value": 1}

    saved = kept(build())
    damage(saved.values)
    state = build()
    before = state["model"].weight.detach().clone()
    with pytest.raises((Corrupt, Unsupported)):
        saved.restore(State(state))
    assert same(state["model"].weight.detach(), before)


Build = Callable[[torch.optim.Optimizer], Any]
REJECTED: dict[str, tuple[Build, Build]] = {
    "scaler": (lambda _: torch.amp.GradScaler("cpu", enabled=False), lambda _: torch.amp.GradScaler("cpu")),
    "one in place of two": (
        lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2), StepLR(o, 3)], [2, 4]),
        lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2)], [2]),
    ),
    "another kind": (lambda o: StepLR(o, 2), lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 2)], [2])),
}


@pytest.mark.parametrize(("saved", "live"), REJECTED.values(), ids=REJECTED)
def test_a_state_that_a_scheduler_or_scaler_rejects_changes_nothing(saved: Build, live: Build) -> None:
    def build(make: Build) -> dict[str, Any]:
        weight = nn.Parameter(torch.rand(2))
        optimizer = torch.optim.SGD([weight], lr=random.random())
        one = make(optimizer)
        optimizer.step()
        return {"weight": weight, "optimizer": optimizer, "one": one}

    def content(state: dict[str, Any]) -> Any:
        one = state["one"]
        return state["weight"].tolist(), state["optimizer"].state_dict(), one.state_dict()

    checkpoint, state = kept(build(saved)), build(live)
    before = copy.deepcopy(content(state))
    with pytest.raises(InvalidInput, match=r"one: .* rejected the state .* Nothing was changed"):
        checkpoint.restore(State(state))
    assert content(state) == before


class _Rate:
    """A schedule with a state of its own, as `LambdaLR` takes it."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, epoch: int) -> float:
        self.calls.append(epoch)
        return 0.9**epoch


class _RateWithoutCopies(_Rate):
    def __copy__(self) -> Any:
        raise TypeError("no copies")


@pytest.mark.parametrize("kind", [_Rate, _RateWithoutCopies])
def test_a_rehearsal_does_not_reach_the_live_scheduler(kind: type[_Rate]) -> None:
    def build() -> Any:
        return LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), kind())

    scheduler: Any = build()
    saved = kept({"scheduler": scheduler})
    live: Any = build()
    live.lr_lambdas[0].calls.append(99)
    before = copy.deepcopy(live.state_dict())
    load = saved.plan(State({"scheduler": live}))
    assert live.state_dict() == before
    saved.fill(load).finish()
    assert live.state_dict() == scheduler.state_dict()


def test_a_torch_generator_of_another_size_is_refused_before_anything_changes() -> None:
    saved = kept({"a": torch.ones(2), "g": torch.Generator()})
    saved.specs["g"] = Tensor("uint8", (16,), None)  # as on another kind of device
    state = {"a": torch.zeros(2), "g": torch.Generator()}
    with pytest.raises(InvalidInput, match=r"shape \(16,\), expected .* Nothing was changed"):
        saved.restore(State(state))
    assert state["a"].tolist() == [0, 0]


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), torch.rand(1).item()]


def test_process_wide_generators_are_restored_last() -> None:
    """Also when a user's load_state_dict() draws numbers."""

    class Drawer(Stateful):
        def load_state_dict(self, state: Any) -> None:
            _draw()

    random.gauss(0, 1)
    saved = kept({"drawer": Drawer({"x": torch.zeros(1)})})
    assert "rng.torch" in saved.tensors
    expected = _draw()
    saved.restore(State({"drawer": Drawer({"x": torch.zeros(1)})}))
    assert _draw() == expected


def test_generators_from_another_rank_are_reseeded_deterministically() -> None:
    """On another world size, streams are new, reproducible and noted."""
    saved = kept({"x": 1})
    own = _draw()
    load = saved.restore(State({"x": 1}), own_rank=False)
    borrowed = _draw()
    assert borrowed != own
    assert len(load.generator_notes) == 1
    saved.restore(State({"x": 1}), own_rank=False)
    assert _draw() == borrowed


def test_load_state_dict_receives_the_result_of_state_dict() -> None:
    """Nested tuples, lists and dicts with tensors, non-string keys and ties inside."""
    shared = torch.arange(3)
    trained = torch.ones(2, 2, requires_grad=True)
    state = {"a": (shared, [shared, None]), 5: {"t": trained}, "n": np.float32(2)}
    other = Stateful()
    kept({"thing": Stateful(state)}).restore(State({"thing": other}))
    assert same(other.state["a"], state["a"])
    assert other.state["a"][0] is other.state["a"][1][0]
    assert other.state[5]["t"].tolist() == [[1, 1], [1, 1]]
    assert not other.state[5]["t"].requires_grad
    assert other.state["n"] == 2


def test_the_error_of_a_stateful_object_names_its_key() -> None:
    class Picky(Stateful):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("lost")

    with pytest.raises(InvalidInput, match=r"picky: .*lost"):
        kept({"picky": Picky({})}).restore(State({"picky": Picky({})}))


@pytest.mark.parametrize("key", ["", "rng", "a/b", "a@r1", 3])
def test_bad_keys_are_refused(key: Any) -> None:
    """When the state is made, and when a key is added later."""
    with pytest.raises(InvalidInput, match="key of the state"):
        State({key: 1})
    objects: dict[Any, Any] = {"x": 1}
    state = State(objects)
    objects[key] = 1
    with pytest.raises(InvalidInput, match="key of the state"):
        state.capture()


class OnlySaved:
    def state_dict(self) -> dict[str, Any]:
        return {}


def _nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, r"x\.a\[1\]"),
        (print, "x is a"),
        ({"m": OnlySaved()}, r"x\.m .*has state_dict\(\) but not load_state_dict"),
        ({1: torch.zeros(1), "1": torch.zeros(1)}, r"x\.1"),
        (_nested(5000), "x contains itself.*flat list"),
        (random.SystemRandom(), "SystemRandom"),
    ],
)
def test_values_that_cannot_be_saved_are_refused_with_their_path(value: Any, path: str) -> None:
    """Before the first step, not at the first save."""
    with pytest.raises(InvalidInput, match=path):
        State({"x": value})


class Sub(torch.Tensor):
    """A tensor subclass."""


BARE: dict[str, Callable[[], torch.Tensor]] = {
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.zeros(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "Sub": lambda: torch.zeros(2).as_subclass(Sub),
}


@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|nested tensors|quantized)")
@pytest.mark.parametrize("why", BARE)
def test_tensors_without_plain_bytes_are_refused(why: str) -> None:
    """With their key path, wherever they are."""
    tensor = BARE[why]()
    with pytest.raises(Unsupported, match=f"x.a cannot be saved: .*{why}"):
        State({"x": {"a": tensor}})
    model = nn.Linear(1, 1)
    model.register_buffer("b", tensor)
    with pytest.raises(Unsupported, match=f"m.b cannot be saved: .*{why}"):
        State({"m": model}).capture()


def test_annotated_values_keep_their_annotation() -> None:
    saved = kept({"a": replicated(3), "b": per_rank([1])})
    objects: dict[str, Any] = {"a": replicated(0), "b": per_rank([2])}
    saved.restore(State(objects))
    assert objects["a"] == replicated(3)
    assert objects["b"].value == [1]


def test_dtype_names_round_trip() -> None:
    assert dtype_name(torch.bfloat16) == "BF16"
    assert torch_dtype("F8_E4M3") is torch.float8_e4m3fn
    for dtype in (torch.float32, torch.int64, torch.bool, torch.uint16, torch.complex64):
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(Unsupported):
        dtype_name(torch.complex128)
    with pytest.raises(Unsupported):
        torch_dtype("F4")
