"""State that libraries leave out of their state_dict(): restored too, so that training continues exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.checkpoint.state import State
from state.trip import advance, kept, same, training

schedulefree = pytest.importorskip("schedulefree")
torchmetrics = pytest.importorskip("torchmetrics")


def build(kind: str) -> dict[str, Any]:
    torch.manual_seed(3)
    if kind == "adamw":
        return training(schedulefree.AdamWScheduleFree)
    return training(lambda p: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(p, 0.1), momentum=0.9))


@pytest.mark.parametrize("kind", ["wrapper", "adamw"])
@pytest.mark.parametrize("is_evaluating", [False, True])
def test_a_schedule_free_training_continues_exactly(kind: str, is_evaluating: bool) -> None:
    """Saved while training or while evaluating, and switched to training after the restore, as scripts do."""
    state = build(kind)
    state["optimizer"].train()
    advance(state, 3)
    if is_evaluating:
        state["optimizer"].eval()
    saved = kept(state)
    live = build(kind)
    saved.restore(State(live))
    rng = torch.get_rng_state()
    for one in (state, live):
        torch.set_rng_state(rng)
        one["optimizer"].train()
        advance(one, 2)
        one["optimizer"].eval()
    assert same(dict(state["model"].state_dict()), dict(live["model"].state_dict()))


class Mean(torchmetrics.Metric):  # type: ignore[misc]
    """A metric whose state is averaged over its updates."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("average", torch.zeros(()), dist_reduce_fx="mean", persistent=True)

    def update(self, value: torch.Tensor) -> None:
        self.average = value

    def compute(self) -> torch.Tensor:
        return self.average


def test_a_metric_weighs_its_next_update_as_without_a_restart() -> None:
    """Its number of updates is no part of its state_dict(), and its last result must not stay."""
    metric, live = Mean(), Mean()
    for value in (1.0, 2.0, 6.0):
        metric(torch.tensor(value))
    live(torch.tensor(50.0))
    live.compute()
    saved = kept({"all": torch.nn.ModuleList([metric])})
    saved.restore(State({"all": torch.nn.ModuleList([live])}))
    assert live.compute() == metric.compute() == 3
    metric(torch.tensor(11.0))
    live(torch.tensor(11.0))
    assert live.compute() == metric.compute() == 5
