"""Optimizer state follows parameters by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state import Load, State
from holdfast.errors import InvalidInput
from state.trip import Net, kept, same, train


def _trained(groups: Any = None) -> tuple[Net, torch.optim.AdamW]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters() if groups is None else groups(model), 1e-2)
    train(model, optimizer, 2)
    return model, optimizer


def _split(model: Net) -> list[dict[str, Any]]:
    """Two groups: weights decayed, others not."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.5}]


def _restored(
    model: nn.Module, optimizer: Any, make: Callable[[Any], Any], other: Any = None
) -> tuple[Any, Any, Load]:
    """Restore a model and its optimizer into another model and the optimizer that `make` gives it."""
    other = Net() if other is None else other
    live = make(other)
    return other, live, kept({"m": model, "o": optimizer}).restore(State({"m": other, "o": live}))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}


def test_optimizer_state_is_named_after_parameters() -> None:
    model, optimizer = _trained()
    captured = State({"optimizer": optimizer, "model": model}).capture()
    assert "optimizer.state.model.inner.weight.exp_avg" in captured.tensors
    group = captured.values["optimizer"]["param_groups"][0]
    assert group["params"][0] == "model.embed.weight"
    assert group["betas"] == {"$tuple": [0.9, 0.999]}
    optimizer_names = {name for name in captured.tensors if name.startswith("optimizer.state.")}
    parameters = {name for name in captured.tensors if name.startswith("model.")} - {
        f"model.norm.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert captured.structure.owned == optimizer_names | parameters


def test_parameter_groups_in_another_order_get_their_own_options() -> None:
    model, optimizer = _trained(_split)
    model2, optimizer2, load = _restored(model, optimizer, lambda m: torch.optim.AdamW(_split(m)[::-1], 1.0))
    assert not load.notes
    assert [g["weight_decay"] for g in optimizer2.param_groups] == [0.0, 0.1]
    assert [g["lr"] for g in optimizer2.param_groups] == [0.5, 1e-2]
    assert same(_by_name(model2, optimizer2), _by_name(model, optimizer))


def test_parameter_groups_split_differently_are_noted_if_options_differ() -> None:
    """One live group over two saved ones gets the first one's options, with a note."""
    model, optimizer = _trained(_split)
    model2, optimizer2, load = _restored(model, optimizer, _adamw)
    assert optimizer2.param_groups[0]["weight_decay"] == 0.1
    assert len(load.notes) == 1
    assert "2 saved groups" in load.notes[0]
    assert same(_by_name(model2, optimizer2), _by_name(model, optimizer))


def test_one_saved_group_fills_two_live_ones_without_sharing_tensors() -> None:
    """A tensor learning rate of one group does not become one tensor in two groups."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.25))

    def halves(other: Net) -> Any:
        parameters = list(other.parameters())
        return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])

    _, optimizer2, _ = _restored(model, optimizer, halves)
    rates = [group["lr"] for group in optimizer2.param_groups]
    assert [float(rate) for rate in rates] == [0.25, 0.25]
    assert rates[0].data_ptr() != rates[1].data_ptr()


def test_tensor_learning_rates_are_filled_in_place() -> None:
    """A scheduler may change a rate between steps, so it must be copied at once."""
    model, rate = Net(), torch.tensor(0.25)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    objects = {"m": model, "o": optimizer}
    captured = State(objects).capture()
    assert "o.param_groups.0.lr" not in captured.structure.owned
    saved = kept(objects)
    rate.fill_(9)
    saved.restore(State(objects))
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_parameters_outside_the_state_are_numbered() -> None:
    """Their state still comes back by place."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 5.0)
    saved = kept({"o": optimizer})
    assert "o.state.group0.0.momentum_buffer" in saved.tensors
    other = nn.Parameter(torch.ones(2))
    optimizer2 = torch.optim.SGD([other], 0.1, momentum=0.9)
    saved.restore(State({"o": optimizer2}))
    assert optimizer2.state[other]["momentum_buffer"].tolist() == [5.0, 5.0]


def test_state_saved_under_the_other_name_of_a_tied_parameter_is_restored() -> None:

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = Net()
            self.out, self.norm, self.inner, self.embed = inner.out, inner.norm, inner.inner, inner.embed

    model, optimizer = _trained()
    other, optimizer2, load = _restored(model, optimizer, _adamw, Swapped())
    assert not load.notes
    found, expected = optimizer2.state[other.embed.weight], optimizer.state[model.embed.weight]
    assert same(found["exp_avg"], expected["exp_avg"])
    assert optimizer2.param_groups[0]["lr"] == 1e-2


def test_parameters_that_were_tied_get_state_of_their_own() -> None:
    """Two parameters that shared the objects would update them twice in each step."""
    model, optimizer = _trained()
    other = Net()
    other.out.weight = nn.Parameter(torch.zeros(11, 8))
    _, optimizer2, load = _restored(model, optimizer, _adamw, other)
    first, second = optimizer2.state[other.embed.weight], optimizer2.state[other.out.weight]
    expected = optimizer.state[model.embed.weight]
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert same(first[name], expected[name])
        assert same(second[name], expected[name])
        assert first[name].data_ptr() != second[name].data_ptr()
    (note,) = load.notes
    assert "out.weight: it was tied to" in note


def test_a_shared_step_counter_stays_shared() -> None:
    model = nn.Linear(2, 2)
    optimizer = _sgd(model)
    step = torch.tensor(3.0)
    for parameter in model.parameters():
        optimizer.state[parameter]["step"] = step
    other, optimizer2, _ = _restored(model, optimizer, _sgd, nn.Linear(2, 2))
    assert optimizer2.state[other.weight]["step"] is optimizer2.state[other.bias]["step"]


def test_nested_state_and_state_without_a_parameter_are_restored() -> None:
    """Whatever an optimizer puts into its state, by whatever key."""
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state["global"] = {"count": 3, "table": torch.ones(2)}
    deep = [torch.zeros(1), (torch.ones(1), None)]
    optimizer.state[model.weight] = {"n": 1, "deep": deep, "a.b": torch.ones(3)}
    other = nn.Linear(2, 2)
    optimizer2: Any = torch.optim.SGD(other.parameters(), 0.1)
    optimizer2.state["stale"] = 1
    kept({"m": model, "o": optimizer}).restore(State({"m": other, "o": optimizer2}))
    assert same(optimizer2.state["global"], optimizer.state["global"])
    found = optimizer2.state[other.weight]
    assert same({key: found[key] for key in optimizer.state[model.weight]}, optimizer.state[model.weight])
    assert len(found) == 3
    assert "stale" not in optimizer2.state


class OwnCode(torch.optim.SGD):
    """An optimizer with save and load code of its own."""

    note = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.note = state_dict.pop("note")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_its_own_load_state_dict_uses_it() -> None:
    """Its parameters are owned; its tensors are copied at once."""
    model = Net()
    optimizer = OwnCode(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, 2)
    optimizer.note = 7
    objects = {"m": model, "o": optimizer}
    state = State(objects)
    captured = state.capture()
    assert state.optimizers() == [optimizer]
    assert "m.inner.weight" in captured.structure.owned
    assert "o.state.0.momentum_buffer" in captured.tensors
    assert not any(name.startswith("o.") for name in captured.structure.owned)
    other = Net()
    optimizer2 = OwnCode(other.parameters(), 0.2, momentum=0.9)
    kept(objects).restore(State({"m": other, "o": optimizer2}))
    assert optimizer2.note == 7
    assert same(_by_name(other, optimizer2), _by_name(model, optimizer))
    plain = torch.optim.SGD(other.parameters(), 0.2)
    with pytest.raises(InvalidInput, match="o was not saved as a plain optimizer"):
        kept(objects).plan(State({"m": other, "o": plain}))


def test_state_dict_hooks_of_an_optimizer_run() -> None:
    """An optimizer that gets a hook later is saved through its state_dict() from then on."""
    model, optimizer = _trained()
    state = State({"m": model, "o": optimizer})
    assert "o.state.m.inner.weight.exp_avg" in state.capture().tensors

    def hook(_: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "added": 1}

    optimizer.register_state_dict_post_hook(hook)
    assert state.capture().values["o"]["added"] == 1


def test_the_error_names_options_that_cannot_be_saved() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(InvalidInput, match=r"o\.param_groups\[0\]\.callback"):
        State({"o": optimizer}).capture()


def _channels_last() -> Any:
    model: Any = nn.Conv2d(3, 6, 3)
    return model.to(memory_format=torch.channels_last)


def _transposed() -> nn.Module:
    layer = nn.Linear(6, 4)
    layer.weight = nn.Parameter(torch.randn(6, 4).t())
    return layer


@pytest.mark.parametrize("make_model", [_channels_last, _transposed])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
        lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, fused=True),
        lambda parameters: torch.optim.Adam(parameters, 1e-2),
    ],
    ids=["fused AdamW", "fused SGD", "Adam"],
)
def test_restored_state_has_the_memory_format_of_its_parameter(make_model: Any, make_optimizer: Any) -> None:
    """Fused optimizers go through memory without looking at strides, so training would differ."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = make_model()
        return model, make_optimizer(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            shape = (4, 3, 8, 8) if isinstance(model, nn.Conv2d) else (4, 6)
            model(torch.randn(shape)).square().mean().backward()
            optimizer.step()

    model, optimizer = build()
    step(model, optimizer, 3)
    saved = kept({"model": model, "optimizer": optimizer})
    model2, optimizer2 = build()
    saved.restore(State({"model": model2, "optimizer": optimizer2}))
    torch.manual_seed(1)
    step(model, optimizer, 3)
    torch.manual_seed(1)
    step(model2, optimizer2, 3)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), model2.parameters(), strict=True))


def test_a_meta_parameter_becomes_real_in_its_memory_format() -> None:
    saved = kept({"model": _channels_last()})
    with torch.device("meta"):
        model = _channels_last()
    saved.restore(State({"model": model}))
    assert not model.weight.is_meta
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
