"""Saves between two steps of an optimizer, when gradients have been accumulated."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.errors import ResumeWarning
from stage.training import make_checkpointer


def warnings_of(home: Path, *, every: int, scale: float = 1.0, num_parts: int = 4) -> list[str]:
    """Texts of the warnings of a loop over parts of batches, with an update after every few of them."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        warnings.catch_warnings(record=True) as caught,
        make_checkpointer(home, {"model": model, "optimizer": optimizer}, every=every) as ckpt,
    ):
        warnings.simplefilter("always")
        for step in ckpt.steps(12):
            (scale * model(torch.randn(4, 8)).square().mean()).backward()
            if (step + 1) % num_parts == 0:
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in caught if issubclass(one.category, ResumeWarning)]


def test_a_save_with_unused_gradients_warns(tmp_path: Path) -> None:
    found = warnings_of(tmp_path / "home", every=5)
    assert found
    assert all("gradients are not saved" in text for text in found)


@pytest.mark.parametrize(
    "options", [{"every": 4}, {"every": 3, "num_parts": 1}, {"every": 6, "num_parts": 2}]
)
def test_saves_after_updates_do_not_warn(tmp_path: Path, options: dict[str, int]) -> None:
    assert warnings_of(tmp_path / "home", **options) == []


def test_a_step_of_the_loop_without_gradients_of_its_own_does_not_warn(tmp_path: Path) -> None:
    """Gradients that an update has used remain until the next `zero_grad`."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with make_checkpointer(tmp_path / "home", {"model": model, "optimizer": optimizer}, every=3) as ckpt:
        for step in ckpt.steps(9):
            if step % 3 < 2:
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()


def test_an_update_that_a_gradient_scaler_would_leave_out_does_not_warn(tmp_path: Path) -> None:
    assert warnings_of(tmp_path / "home", every=5, scale=float("inf")) == []


def test_gradients_that_the_state_saves_are_not_warned_of(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4, 8)).sum().backward()
    gradients = [one.grad for one in model.parameters()]
    state = {"model": model, "optimizer": optimizer, "gradients": gradients}
    with make_checkpointer(tmp_path / "home", state, every=1) as ckpt:
        for step in ckpt.steps(4):
            model(torch.randn(4, 8)).sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
