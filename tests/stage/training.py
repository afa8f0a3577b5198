"""A small model to train, and a gate that stops the background copy, for the tests of staging."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import holdfast
from holdfast.checkpoint.format.catalog import Catalog, Tensor
from holdfast.checkpoint.format.layout import whole
from holdfast.checkpoint.keeper import Keeper
from holdfast.checkpoint.stage import SavePlan, stager
from holdfast.checkpoint.state import CapturedState
from holdfast.checkpoint.state.tensor_table import StateStructure

WAIT_S = 600.0


class CopyGate:
    """Holds the copies that run beside training until it is opened; those that block `save` pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._copy, self._monkeypatch = stager.copy_all, monkeypatch
        monkeypatch.setattr(stager, "copy_all", self._gated)

    def _gated(
        self, views: list[torch.Tensor], live: list[torch.Tensor], *, non_blocking: bool = False
    ) -> None:
        if threading.current_thread().name == "holdfast-stage":
            self.reached.set()
            assert self.opened.wait(WAIT_S)
        self._copy(views, live, non_blocking=non_blocking)

    def open_when_stepping(self, optimizers: Iterable[Optimizer]) -> None:
        """Open at the beginning of an optimizer's step, before any hook of it runs; call it before a save."""
        wanted, before_step = list(optimizers), stager.Stager._before_step

        def opening(stager: stager.Stager, optimizer: Optimizer) -> None:
            if any(optimizer is one for one in wanted):
                self.opened.set()
            before_step(stager, optimizer)

        self._monkeypatch.setattr(stager.Stager, "_before_step", opening)


WIDTH = 128  # weights of as many columns are large enough to be copied beside training


def make_model(width: int = WIDTH) -> nn.Module:
    """A model with parameters and buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))


def make_training(width: int = WIDTH, **options: Any) -> dict[str, Any]:
    """A state of a model and its optimizer."""
    model = make_model(width)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1, **options)}


def compute_gradients(model: nn.Module, width: int = WIDTH) -> None:
    """One forward and backward pass."""
    model.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, width: int = WIDTH) -> None:
    """One whole training step."""
    compute_gradients(model, width)
    optimizer.step()


def wait_until(is_true: Callable[[], object], limit_s: float = 600.0) -> None:
    """Wait until a condition holds; fail after the limit."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def make_checkpointer(
    home: Path | str | holdfast.Home, state: dict[str, Any] | None, **options: Any
) -> holdfast.Checkpointer:
    """A Checkpointer that leaves the test's signals and output alone."""
    given = options.pop("watches", ())
    if given is not None and not any(one.name == "preemption" for one in given):
        given = [holdfast.Preemption(signals=False), *given]
    return holdfast.Checkpointer(home, state, watches=given, **{"quiet": True, "memory": "2GiB", **options})


def keeper_of(ckpt: holdfast.Checkpointer) -> Keeper:
    """Return the keeper that a Checkpointer has started."""
    assert ckpt._training.attempt.keeper is not None
    return ckpt._training.attempt.keeper


def make_plan(
    tensors: dict[str, torch.Tensor],
    owned: set[str],
    *,
    frozen: Collection[str] = (),
    temporary: Collection[str] = (),
    witnesses: Collection[str] = (),
) -> SavePlan:
    """The plan of rank 0, which writes all tensors but the witnesses, which rank 1 writes."""
    rows = {
        name: Tensor("F32", tuple(one.shape), whole(int(name in witnesses)), (0, 1), name in frozen)
        for name, one in tensors.items()
    }
    none = frozenset[str]()
    structure = StateStructure([], {}, none, frozenset(owned), frozenset(temporary), none, {}, {}, {})
    witness_bytes = sum(tensors[name].nbytes for name in witnesses)
    return SavePlan(CapturedState(tensors, {}, structure), Catalog(rows, {}), 0, witnesses, witness_bytes)


def snapshot(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a state, by the names that a checkpoint gives them."""
    found: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module):
            names.update((id(p), f"{key}.{name}") for name, p in value.named_parameters())
            found.update((f"{key}.{name}", tensor) for name, tensor in value.state_dict().items())
        elif isinstance(value, torch.Tensor):
            found[key] = value
    for key, value in state.items():
        if isinstance(value, Optimizer):
            for parameter, facts in value.state.items():
                for name, tensor in facts.items():
                    found[f"{key}.state.{names[id(parameter)]}.{name}"] = tensor
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def check_saved(home: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    """The checkpoint of `step` holds exactly these tensors, bit for bit."""
    assert expected
    saved = holdfast.open(home, step=step)
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name
