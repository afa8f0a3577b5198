"""`holdfast.tune` profiles a step function and restores its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import holdfast


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x)
        if y.sum() > 1e9:
            y = y * 2
        return y


def training(model: nn.Module, *, reads: bool) -> tuple[Callable[[Any], None], dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            loss.item()

    return step, {"model": model, "optimizer": optimizer}


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def test_planted_lines_are_found_and_the_state_is_restored() -> None:
    torch.manual_seed(0)
    step, state = training(Net(), reads=True)
    batches = [torch.randn(4, 8)] * 3
    before = {name: one.clone() for name, one in state["model"].state_dict().items()}
    random = torch.get_rng_state()
    report = holdfast.tune(step, batches, state, num_steps=4, compile=False)
    assert {(one.kind, one.place.line) for one in report.findings if one.place} == {
        ("graph break", line_of(Net, "if y.sum()")),
        ("sync", line_of(training, "loss.item()")),
    }
    assert "loss.item()" in str(report)
    assert all(torch.equal(one, before[name]) for name, one in state["model"].state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not state["optimizer"].state


def test_a_clean_step_has_no_findings() -> None:
    step, state = training(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), reads=False)
    report = holdfast.tune(step, [torch.randn(4, 8)] * 3, state, num_steps=4, compile=False)
    assert report.findings == ()
    assert report.unanswered == ()


@pytest.mark.slow
def test_compiled_steps_are_compared_with_eager_ones() -> None:
    step, state = training(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), reads=False)
    report = holdfast.tune(step, [torch.randn(4, 8)] * 3, state, num_steps=4)
    (verdict,) = report.verdicts
    assert verdict.warm_up_s > 0
    assert not verdict.failure


def test_a_function_without_an_optimizer_step_is_rejected() -> None:
    with pytest.raises(holdfast.InvalidInput, match="no optimizer"):
        holdfast.tune(lambda _: None, [1, 2], {})
    with pytest.raises(holdfast.InvalidInput, match="got no batches"):
        holdfast.tune(lambda _: None, [], {})
