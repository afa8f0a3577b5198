"""Values of the program's own types, restored only into live values of the same types."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import types
import typing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.state import State
from holdfast.errors import InvalidInput
from state.trip import Stateful, kept


class Phase(enum.Enum):
    WARM = "warm"
    TRAIN = "train"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Parts(enum.Flag):
    BODY = 1
    HEAD = 2


class Pair(typing.NamedTuple):
    step: Any
    tensor: Any


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Config:
    lr: float
    buffer: Any = None
    inner: Any = None
    calls: typing.ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).calls += 1

    @functools.cached_property
    def half(self) -> float:
        return self.lr / 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    items: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int


def test_a_dataclass_is_filled_in_place() -> None:
    """Its tensor, its containers and the references to them stay; no constructor runs."""
    saved = kept({"config": Config(0.5, torch.ones(2), {"n": [1]})})
    assert "config.buffer" in saved.tensors
    live = Config(0.1, torch.zeros(2), {"n": [7, 8]})
    buffer, inner, objects = live.buffer, live.inner, {"config": live}
    assert live.half == 0.05
    calls = Config.calls
    saved.restore(State(objects))
    assert Config.calls == calls
    assert objects["config"] is live
    assert live.buffer is buffer
    assert live.inner is inner
    assert (live.lr, live.buffer.tolist(), live.inner, live.half) == (0.5, [1, 1], {"n": [1]}, 0.25)


def test_a_frozen_dataclass_is_replaced() -> None:
    """Whoever holds the old one still sees the old content; what is in it is updated in place."""
    saved = kept({"frozen": Frozen(1, {"a": 1}), "slotted": Slotted(1)})
    old, slotted = Frozen(2, {"a": 2}), Slotted(2)
    objects: dict[str, Any] = {"frozen": old, "slotted": slotted}
    saved.restore(State(objects))
    assert objects["frozen"] == Frozen(1, {"a": 1})
    assert old.x == 2
    assert objects["frozen"].items is old.items
    assert objects["slotted"] is slotted
    assert slotted.x == 1


def test_named_tuples_are_rebuilt() -> None:
    saved = kept({"pair": Pair(1, torch.ones(1)), "in": {"points": [Point(1, (2, Point(3, 4)))]}})
    assert "pair.tensor" in saved.tensors
    tensor = torch.zeros(1)
    objects: dict[str, Any] = {"pair": Pair(0, tensor), "in": {"points": [Point(0, (0, Point(0, 0)))]}}
    saved.restore(State(objects))
    assert objects["pair"].step == 1
    assert objects["pair"].tensor is tensor
    assert tensor.tolist() == [1]
    assert objects["in"] == {"points": [Point(1, (2, Point(3, 4)))]}
    assert type(objects["in"]["points"][0]) is Point


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (Phase.TRAIN, Phase.WARM),
        (Level.HIGH, Level.LOW),
        (Parts.HEAD | Parts.BODY, Parts.HEAD),
        (Parts(0), Parts.HEAD),
        ({Phase.TRAIN: 1}, {Phase.WARM: 0}),
        ({(Phase.TRAIN, 1): 1}, {(Phase.WARM, 0): 0}),
        ({Point(Phase.TRAIN, 1): 1}, {Point(Phase.WARM, 0): 0}),
        ({Phase.TRAIN, Phase.WARM}, {Phase.WARM}),
        (frozenset({Level.HIGH}), frozenset({Level.LOW})),
        (collections.deque([Phase.TRAIN], 4), collections.deque([Phase.WARM], 4)),
        (argparse.Namespace(phase=Phase.TRAIN, n=1), argparse.Namespace(phase=Phase.WARM, n=0)),
        (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[2, 3])),
        (np.ones(2, [("a", "i4"), ("b", "f8")]), np.zeros(2, [("a", "i4"), ("b", "f8")])),
        ([Point(1, 2), Point(3, 4)], [Point(0, 0)]),
        ({"a": Config(1.0), "b": Config(2.0)}, {"x": Config(0.0)}),
        (collections.Counter("aab"), collections.Counter("zz")),
        ([collections.Counter("b"), collections.Counter("c")], [collections.Counter(), 1]),
    ],
    ids=lambda value: type(value).__name__,  # the order in the repr of a set changes
)
def test_values_are_restored_in_their_types(saved: Any, live: Any) -> None:
    objects = {"it": live}
    kept({"it": saved}).restore(State(objects))
    found = objects["it"]
    assert type(found) is type(saved)
    if isinstance(saved, np.ndarray):
        assert found is live
        assert found.tolist() == saved.tolist()
    else:
        assert found == saved
        assert _repr(found) == _repr(saved)  # 1 is equal to an IntEnum's member


def _repr(value: Any) -> Any:
    """Return the repr of a value, of a set those of its members: equal sets may differ in their order."""
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def test_a_namespace_is_filled_in_place() -> None:
    live = argparse.Namespace(lr=0.1, tensor=torch.zeros(1))
    tensor, objects = live.tensor, {"args": live}
    kept({"args": argparse.Namespace(lr=0.5, tensor=torch.ones(1), new=[1])}).restore(State(objects))
    assert objects["args"] is live
    assert (live.lr, live.new) == (0.5, [1])
    assert live.tensor is tensor
    assert tensor.item() == 1


def nested() -> Any:
    return collections.defaultdict(lambda: collections.defaultdict(lambda: Parts(0)))


def test_a_defaultdict_keeps_the_live_factory() -> None:
    """The live factory also makes what the live dict does not have yet."""
    saved = nested()
    saved["a"]["b"] |= Parts.HEAD
    live = nested()
    objects = {"counts": live}
    kept({"counts": saved}).restore(State(objects))
    assert objects["counts"] is live
    assert live == {"a": {"b": Parts.HEAD}}
    assert live["new"]["newer"] == Parts(0)
    assert live["a"]["other"] == Parts(0)


@pytest.mark.parametrize(
    ("saved", "live", "found"),
    [
        (Config(1.0), None, "NoneType"),
        (Config(1.0), {"lr": 1.0}, "dict"),
        (Config(1.0), Frozen(1, 2), "Frozen"),
        (Point(1, 2), (1, 2), "tuple"),
        (Point(1, 2), Pair(1, 2), "Pair"),
        (Level.LOW, 1, "int"),
        (Phase.WARM, "warm", "str"),
        ([Point(1, 2)], [], "nothing"),
        ({Phase.WARM: 1}, {}, "nothing"),
        (collections.defaultdict(int, a=1), {}, "dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_live_type_is_refused_or_left(saved: Any, live: Any, found: str) -> None:
    """The error has the path, both types and the remedy. With strict=False the live value stays."""
    checkpoint = kept({"it": saved, "n": 1})
    objects = {"it": live, "n": 0}
    with pytest.raises(InvalidInput, match=rf"it.* was saved as a .* holds (a \S*)?{found} there"):
        checkpoint.plan(State(objects))
    assert objects["n"] == 0
    load = checkpoint.restore(State(objects), strict=False)
    assert objects == {"it": live, "n": 1}
    assert any("it" in note and "strict=False" in note for note in load.notes)


def renamed(kind: type, old: type) -> type:
    """A class under the name of another one, as after a change of the program."""
    kind.__module__, kind.__qualname__ = old.__module__, old.__qualname__
    return kind


def test_fields_that_only_one_side_has_are_named() -> None:
    @dataclasses.dataclass
    class Changed:
        lr: float
        inner: Any
        momentum: float = 0.9

    renamed(Changed, Config)
    saved = kept({"config": Config(0.5, None, [1])})
    live = Changed(0.1, [2])
    with pytest.raises(InvalidInput, match=r"config\.momentum.*config\.buffer"):
        saved.plan(State({"config": live}))
    load = saved.restore(State({"config": live}), strict=False)
    assert live == Changed(0.5, [1], 0.9)
    assert load.missing == ["config.momentum"]
    assert "config.buffer" in load.unexpected
    namespace = argparse.Namespace(a=0, new=5)
    saved = kept({"args": argparse.Namespace(a=1)})
    with pytest.raises(InvalidInput, match=r"args\.new"):
        saved.plan(State({"args": namespace}))
    saved.restore(State({"args": namespace}), strict=False)
    assert namespace == argparse.Namespace(a=1, new=5)


def test_a_member_and_a_field_that_no_longer_exist_are_named() -> None:
    class Renamed(enum.Enum):
        START = "warm"

    renamed(Renamed, Phase)
    with pytest.raises(InvalidInput, match=r"it was saved as Phase\.WARM, which this class does not have"):
        kept({"it": Phase.WARM}).plan(State({"it": Renamed.START}))
    New = renamed(collections.namedtuple("New", "x z"), Point)
    objects = {"it": New(0, 9)}
    with pytest.raises(InvalidInput, match=r"it\.z.*it\.y"):
        kept({"it": Point(1, 2)}).plan(State(objects))
    kept({"it": Point(1, 2)}).restore(State(objects), strict=False)
    assert objects["it"] == New(1, 9)


def test_a_script_and_the_same_script_imported_have_the_same_types() -> None:
    """A script is `__main__` if it is started, and has a name if it is imported."""

    def config(module: str) -> Any:
        kind = dataclasses.make_dataclass("Config", [("lr", float)])
        renamed(kind, Config).__module__ = module
        return kind

    Main, Imported = config("__main__"), config(Config.__module__)
    for saved, live in ((Main(1.0), Imported(0.0)), (Imported(1.0), Main(0.0))):
        kept({"it": saved}).restore(State({"it": live}))
        assert live.lr == 1.0


class Loose:
    pass


def test_state_that_fields_do_not_show_is_refused() -> None:
    config, unset = Config(1.0), Config(1.0)
    config.extra = 3  # type: ignore[attr-defined]
    del unset.lr
    refused: list[tuple[Any, str]] = [
        (config, "it is a Config with attributes that are not fields.*: extra"),
        (unset, "it is a Config whose field lr is not set"),
        (Config(1.0, None, Loose()), r"it\.inner is a .*Loose, which cannot be saved"),
        ({Frozen(1, 2): 3}, "Frozen.*cannot be saved"),
    ]
    for value, match in refused:
        with pytest.raises(InvalidInput, match=match):
            State({"it": value})


def test_a_dataclass_with_state_dict_saves_itself() -> None:
    @dataclasses.dataclass
    class Counter:
        seen: int
        calls: int = 0

        def state_dict(self) -> dict[str, int]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]
            self.calls += 1

    live = Counter(0)
    kept({"it": Counter(5)}).restore(State({"it": live}))
    assert live == Counter(5, calls=1)


class Keeping(nn.Module):
    """A module whose extra state has values of its own types."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def get_extra_state(self) -> dict[str, Any]:
        return {"config": self.config, "phase": Phase(self.config.inner)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.config = state["config"]
        self.config.inner = state["phase"].value


def test_objects_load_the_types_that_they_save() -> None:
    """In state_dict(), in a module's extra state and in an optimizer's options."""

    def build(n: int) -> dict[str, Any]:
        phase = list(Phase)[n]
        model = Keeping(Config(float(n), torch.full((2,), float(n)), phase.value))
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.param_groups[0]["phase"] = phase
        meter = Stateful({"phase": phase, "config": Config(float(n))})
        return {"meter": meter, "model": model, "optimizer": optimizer}

    objects = build(0)
    kept(build(1)).restore(State(objects))
    assert objects["meter"].state == {"phase": Phase.TRAIN, "config": Config(1.0)}
    assert objects["model"].config.inner == "train"
    assert objects["model"].config.buffer.tolist() == [1, 1]
    assert objects["optimizer"].param_groups[0]["phase"] is Phase.TRAIN


def test_the_state_of_an_optimizer_refuses_types_that_a_restart_does_not_have() -> None:
    """A new optimizer has no state, so nothing could show its types."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"phase": Phase.WARM}
    with pytest.raises(InvalidInput, match="Phase, which cannot be saved"):
        State({"optimizer": optimizer}).capture()
