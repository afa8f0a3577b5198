"""Modules, optimizers and other objects with a state of their own inside containers of a state."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from holdfast.checkpoint.state import State, per_rank, replicated
from holdfast.errors import InvalidInput
from stage.training import make_model
from state.trip import Net, assert_same_state, kept, train, training


@dataclasses.dataclass
class Training:
    """All objects of a training in one dataclass."""

    model: Net
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: int


def build(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, other = Net(), Net()
    optimizers = [AdamW(model.parameters()), SGD(other.parameters(), 0.1, momentum=0.9)]
    state = {
        "gan": {"g": model, "d": other, "optimizers": optimizers, "seen": [seed], 3: random.Random(seed)},
        "training": Training(Net(), Adam([nn.Parameter(torch.ones(1))]), StepLR(optimizers[1], 1), seed),
        "generators": (torch.Generator().manual_seed(seed), collections.deque([random.Random(seed)])),
    }
    for _ in range(steps):
        train(model, optimizers[0], 1)
        train(other, optimizers[1], 1, state["training"].scheduler.step)
        state["gan"]["seen"].append(len(state["gan"]["seen"]))
    return state


def parts_of(live: dict[str, Any]) -> list[Any]:
    """Return the objects of a state that a restore must keep."""
    gan, training, (generator, others) = live["gan"], live["training"], live["generators"]
    parts = [gan["g"], gan["d"], gan["optimizers"], *gan["optimizers"], gan[3]]
    return [*parts, training, training.model, training.scheduler, generator, others[0]]


def test_objects_in_containers_resume_in_place() -> None:
    """Each live object stays the same, at any depth; values beside them are restored too."""
    objects = build(1, 2)
    saved = kept(objects)
    live = build(2, 0)
    parts = parts_of(live)
    saved.restore(State(live))
    assert_same_state(live, objects)
    assert all(one is other for one, other in zip(parts, parts_of(live), strict=True))
    assert (live["gan"]["seen"], live["training"].step) == ([1, 1, 2], 1)
    assert torch.rand(3, generator=live["generators"][0]).tolist() == (
        torch.rand(3, generator=objects["generators"][0]).tolist()
    )


def test_names_are_key_paths() -> None:
    captured = State(build(1, 1)).capture()
    assert {"gan.g.embed.weight", "gan.d.inner.bias", "training.model.norm.weight"} <= captured.tensors.keys()
    assert "gan.optimizers.0.state.gan.g.inner.bias.exp_avg" in captured.tensors
    assert "gan.optimizers.1.state.gan.d.inner.bias.momentum_buffer" in captured.tensors
    assert captured.structure.tied["gan.g.out.weight"] == "gan.g.embed.weight"
    assert captured.values["gan"]["$dict"][0] == ["g", {"$entry": "gan.g"}]


def test_optimizers_in_containers_own_their_parameters() -> None:
    """As at the top level: their steps are watched, and what they do not train is frozen."""
    adapter, head = make_model(), make_model()
    for parameter in list(adapter.parameters())[:2]:
        parameter.requires_grad_(False)
    optimizer = SGD([p for p in adapter.parameters() if p.requires_grad], 0.1)
    nested = State({"all": [{"model": adapter, "head": head, "optimizer": optimizer}]})
    flat = State({"model": adapter, "head": head, "optimizer": optimizer})
    assert nested.optimizers() == flat.optimizers() == [optimizer]
    one, other = nested.capture(), flat.capture()
    assert one.structure.owned == {f"all.0.{name}" for name in other.structure.owned}
    assert one.structure.frozen == {f"all.0.{name}" for name in other.structure.frozen}
    assert "all.0.model.0.weight" in one.structure.frozen
    assert "all.0.model.2.weight" in one.structure.owned


def test_an_object_in_two_places_is_saved_once() -> None:
    one = training(Adam, steps=1)
    objects = {"a": one, "b": list(one.values())}
    captured = State(objects).capture()
    alone = State({"a": one}).capture()
    assert captured.tensors.keys() == alone.tensors.keys()
    assert captured.structure.tied["b.0.inner.weight"] == "a.model.inner.weight"
    assert State(objects).optimizers() == [one["optimizer"]]
    other = training(Adam)
    live = {"a": other, "b": list(other.values())}
    kept(objects).restore(State(live))
    assert_same_state(live, objects)


def test_an_optimizer_that_moved_into_a_container_is_restored_by_its_new_name() -> None:
    objects, live = training(Adam, steps=1), {"train": training(Adam)}
    rename = {"model": "train.model", "optimizer": "train.optimizer"}
    kept(objects).restore(State(live), rename=rename)
    assert_same_state(live, {"train": objects})


def nets(count: int) -> list[nn.Linear]:
    return [nn.Linear(1, 1) for _ in range(count)]


def test_a_list_that_became_longer_or_shorter_is_refused_with_the_names() -> None:
    saved = kept({"nets": nets(2)})
    with pytest.raises(InvalidInput, match=r"in the live state but not in the checkpoint: nets\.2\.weight"):
        saved.plan(State({"nets": nets(3)}))
    with pytest.raises(InvalidInput, match=r"in the checkpoint but not in the live state: nets\.1"):
        saved.plan(State({"nets": nets(1)}))
    for count in (1, 3):
        live = nets(count)
        objects = {"nets": list(live)}
        saved.restore(State(objects), strict=False)
        assert all(one is other for one, other in zip(objects["nets"], live, strict=True))
        assert torch.equal(live[0].weight, saved.tensors["nets.0.weight"])


def test_values_never_replace_live_objects() -> None:
    """Neither a value saved in their place nor a container that lacks them."""
    model = nn.Linear(1, 1)
    objects: dict[str, Any] = {"x": {"a": [model, 1], "b": model, "n": 0}}
    for saved in ({"a": [5], "b": 6, "n": 1}, {"a": 7, "n": 1}):
        load = kept({"x": saved}).restore(State(objects), strict=False)
        assert "x.b.weight" in load.missing
        assert objects["x"]["a"][0] is objects["x"]["b"] is model
        assert objects["x"]["n"] == 1


def test_only_chooses_whole_containers_or_single_objects() -> None:
    saved = kept({"x": {"a": nn.Linear(1, 1), "n": 5}, "b": nn.Linear(1, 1)})
    for only, filled, n in (["x"], {"x.a.weight", "x.a.bias"}, 5), (["x.a"], {"x.a.weight", "x.a.bias"}, 0):
        objects = {"x": {"a": nn.Linear(1, 1), "n": 0}, "b": nn.Linear(1, 1)}
        load = saved.plan(State(objects), only=only)
        assert load.targets.keys() == filled
        saved.fill(load).finish()
        assert objects["x"]["n"] == n
    with pytest.raises(InvalidInput, match=r"only= names \['x.c'\]"):
        saved.plan(State(objects), only=["x.c"])
    with pytest.raises(InvalidInput, match=r"in the checkpoint but not in the live state: x\.a"):
        saved.plan(State({"x": {"n": 0}}), only=["x"])


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        (
            {"x.a": nn.Linear(1, 1), "x": {"a": random.Random(1)}},
            r"would both be saved under .*: a Linear in 'x\.a' and a Random in 'x'",
        ),
        (
            {"x": {1: nn.Linear(1, 1), "1": nn.ReLU()}},
            "would both be saved under .*: a Linear in 'x' and a ReLU in 'x'",
        ),
        ({"x": {"a/b": nn.Linear(1, 1)}}, "key of the state"),
        ({"x": {"a@r1": nn.Linear(1, 1)}}, "key of the state"),
        ({"x": {"n": replicated(1)}}, r"x\.n is a marked int inside a container"),
    ],
)
def test_key_paths_and_marks_that_cannot_be_saved_are_refused(objects: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        State(objects)


def test_marks_hold_for_containers_and_inside_them() -> None:
    def build(n: float) -> dict[str, Any]:
        own, shared = nn.Linear(1, 1), nn.Linear(1, 1)
        return {"x": {"own": per_rank(own), "shared": shared}, "y": per_rank([nn.Linear(1, 1), n])}

    objects = build(1.0)
    captured = State(objects, world=(0, 2)).capture()
    assert {name for name in captured.structure.per_rank if not name.startswith("rng")} == {
        *("x.own.weight", "x.own.bias", "y.0.weight", "y.0.bias")
    }
    live = build(2.0)
    kept(objects).restore(State(live))
    assert_same_state(live, objects)
