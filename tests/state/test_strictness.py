"""Loading when the live state and the checkpoint differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state import State
from holdfast.errors import InvalidInput
from state.trip import Net, kept, same, step_once, training


def test_missing_and_unexpected_names_are_listed_with_advice() -> None:
    """Both directions, with counts, and nothing is changed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = kept({"m": model, "old": 1, "gone": {"a": torch.ones(1)}})
    objects: dict[str, Any] = {"m": nn.ModuleDict({"0": nn.Linear(2, 2), "x": nn.Linear(2, 2)}), "new": 2}
    with pytest.raises(InvalidInput) as caught:
        saved.plan(State(objects))
    message = str(caught.value)
    assert "3 in the live state but not in the checkpoint: m.x.weight, m.x.bias, new" in message
    assert "4 in the checkpoint but not in the live state: old, gone, m.1.weight, m.1.bias" in message
    assert "strict=False" in message
    load = saved.restore(State(objects), strict=False)
    assert load.missing == ["m.x.weight", "m.x.bias", "new"]
    assert load.unexpected == ["old", "gone", "m.1.weight", "m.1.bias"]
    assert objects["new"] == 2
    assert same(objects["m"]["0"].weight, saved.tensors["m.0.weight"])


def test_long_lists_are_shortened() -> None:
    saved = kept({"x": 1})
    with pytest.raises(InvalidInput, match=r"24 in the live state.*m\.4\.bias, \.\.\."):
        saved.plan(State({"x": 1, "m": nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))}))


def test_a_different_shape_is_refused_even_if_not_strict() -> None:
    saved = kept({"m": nn.Linear(2, 3)})
    with pytest.raises(InvalidInput, match=r"m\.weight has shape \[4, 2\] .* \[3, 2\] in the checkpoint"):
        saved.plan(State({"m": nn.Linear(2, 4)}), strict=False)


def test_only_restores_the_named_keys() -> None:
    """Everything else, RNG included, stays."""
    saved = kept({**training(steps=1), "epoch": 4, "lost": 1})
    objects: dict[str, Any] = {**training(), "epoch": 0}
    other = objects["model"]
    state = torch.get_rng_state()
    load = saved.restore(State(objects), only={"model"})
    assert all(name.startswith("model.") for name in load.targets)
    expected = {k: saved.tensors[saved.tied.get(f"model.{k}", f"model.{k}")] for k in other.state_dict()}
    assert same(dict(other.state_dict()), expected)
    assert objects["epoch"] == 0
    assert not objects["optimizer"].state
    assert torch.equal(torch.get_rng_state(), state)
    saved.restore(State(objects), only={"optimizer"})
    assert objects["optimizer"].state
    with pytest.raises(InvalidInput, match="only= names"):
        saved.plan(State(objects), only={"modell"})


@pytest.mark.parametrize(
    "rename",
    [
        {"model": "net", "model.inner": "net.hidden", "optimizer": "opt"},
        lambda n: n.replace("model", "net").replace("inner", "hidden").replace("optimizer", "opt"),
    ],
    ids=["mapping", "function"],
)
def test_renaming_applies_to_optimizer_state(rename: Any) -> None:
    """Tensors, top-level keys and the parameters that an optimizer names."""
    objects = training(lambda parameters: torch.optim.AdamW(parameters, 0.125), steps=1)
    model, optimizer = objects.values()
    saved = kept(objects)
    other: Any = Net()
    other.hidden = other.inner
    del other.inner
    optimizer2 = torch.optim.AdamW(other.parameters())
    load = saved.restore(State({"net": other, "opt": optimizer2}), rename=rename)
    assert load.missing == load.unexpected == []
    assert same(other.hidden.weight, model.inner.weight)
    average = optimizer2.state[other.hidden.weight]["exp_avg"]
    assert same(average, optimizer.state[model.inner.weight]["exp_avg"])
    assert optimizer2.param_groups[0]["lr"] == 0.125


def test_a_submodule_can_be_renamed_to_a_top_level_key() -> None:
    """Prefixes may cross top-level keys; what is not taken is reported."""
    saved = kept({"model": nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)})})
    encoder = nn.Linear(2, 2)
    load = saved.restore(State({"encoder": encoder}), rename={"model.encoder": "encoder"}, strict=False)
    assert same(encoder.weight, saved.tensors["model.encoder.weight"])
    assert load.unexpected == ["model.head.weight", "model.head.bias"]
    with pytest.raises(InvalidInput, match=r"model\.head\.weight"):
        saved.plan(State({"encoder": encoder}), rename={"model.encoder": "encoder"})


def test_two_names_renamed_to_one_are_refused() -> None:
    saved = kept({"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(InvalidInput, match="rename= maps both"):
        saved.plan(State({"c": torch.ones(1)}), rename={"a": "c", "b": "c"})


def test_missing_and_unexpected_optimizer_parameters_are_listed_once() -> None:
    """Not once per state tensor; with strict=False the others are restored."""
    model = nn.Linear(2, 2)
    optimizer = step_once(torch.optim.AdamW(model.parameters()))
    saved = kept({"m": model, "o": optimizer})
    other = nn.Linear(2, 2)
    extra = nn.Parameter(torch.ones(1))
    optimizer2 = torch.optim.AdamW([other.weight, extra])
    load = saved.restore(State({"m": other, "o": optimizer2}), strict=False)
    assert load.missing == ["o.param_groups: group0.1"]
    assert load.unexpected == ["o.param_groups: m.bias"]
    assert set(optimizer2.state[other.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert extra not in optimizer2.state
