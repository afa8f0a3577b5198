"""Modules whose own load code gives their tensors the saved shapes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver, get_default_qat_qconfig_mapping, quantize_fx

from holdfast.checkpoint.state import State
from holdfast.errors import InvalidInput
from state.trip import assert_same_state, kept, same


class Rows(nn.Module):
    """A buffer that grows while training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 3))
        self.register_buffer("num_rows", torch.tensor(0))

    def push(self, row: torch.Tensor) -> None:
        self.rows: torch.Tensor = torch.cat([self.rows, row[None]])
        self.num_rows: torch.Tensor = torch.tensor(len(self.rows))


class Queue(Rows):
    """Load code that takes the saved size."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **_: Any) -> None:
        if f"{prefix}rows" in state_dict:
            self.rows = torch.zeros(state_dict[f"{prefix}rows"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class CountedQueue(Rows):
    """Load code that needs the value of another tensor, not only its shape."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **_: Any) -> None:
        self.rows = torch.zeros(int(state_dict[f"{prefix}num_rows"]), 3)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class HookedQueue(Rows):
    """Load code in hooks: a bound method, and a function that gets the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(0))
        self._register_load_state_dict_pre_hook(self._grow)
        self.register_load_state_dict_pre_hook(_grow_sums)

    def push(self, row: torch.Tensor) -> None:
        super().push(row)
        self.sums: torch.Tensor = torch.cat([self.sums, row.sum()[None]])

    def _grow(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        self.rows = torch.zeros_like(state_dict[f"{prefix}rows"])


def _grow_sums(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    module.sums = torch.zeros_like(state_dict[f"{prefix}sums"])


def _observer(*, is_used: bool) -> PerChannelMinMaxObserver:
    observer = PerChannelMinMaxObserver()
    if is_used:
        observer(torch.randn(4, 3))
    return observer


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _queue(kind: Callable[[], Any], *, is_used: bool) -> nn.Module:
    queue = kind()
    model = nn.Sequential(nn.Linear(3, 3), queue)
    for _ in range(5 if is_used else 0):
        queue.push(torch.randn(3))
    return model


MODULES: dict[str, Callable[..., nn.Module]] = {
    "observer": _observer,
    "compiled observer": lambda is_used: nn.Sequential(_compiled(_observer(is_used=is_used))),
    "load method": lambda is_used: _queue(Queue, is_used=is_used),
    "load method that needs values": lambda is_used: _queue(CountedQueue, is_used=is_used),
    "hooks": lambda is_used: _queue(HookedQueue, is_used=is_used),
}


@pytest.mark.parametrize("name", MODULES)
def test_tensors_get_their_saved_shapes_from_load_code(name: str) -> None:
    """A plan alone changes nothing live."""
    model, other = MODULES[name](is_used=True), MODULES[name](is_used=False)
    saved, before = kept({"m": model}), copy.deepcopy(other.state_dict())
    state = State({"m": other})
    load = saved.plan(state)
    assert same(dict(other.state_dict()), dict(before))
    saved.fill(load).finish()
    assert_same_state({"m": model}, {"m": other})


def _qat_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torchao
        mapping = get_default_qat_qconfig_mapping("fbgemm")
        model = quantize_fx.prepare_qat_fx(net.train(), mapping, (torch.randn(2, 4),))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


def test_quantization_aware_training_resumes_exactly() -> None:
    """The observers of a new model are empty until their first batch."""
    model, optimizer = _qat_model()
    _train(model, optimizer, 3)
    saved = kept({"m": model, "o": optimizer})
    _train(model, optimizer, 3)
    again, optimizer_again = _qat_model()
    saved.restore(State({"m": again, "o": optimizer_again}))
    _train(again, optimizer_again, 3)
    assert_same_state({"m": model, "o": optimizer}, {"m": again, "o": optimizer_again})


def test_load_code_that_does_not_adapt_a_shape_is_refused_before_a_restore() -> None:
    """Spectral norm has load code. A layer of another width is still another model."""

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, width)), Queue())

    saved, other = kept({"m": make(4)}), make(5)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InvalidInput, match=r"m\.0\.bias has shape \[5\] in the live state but \[4\]"):
        saved.plan(State({"m": other}))
    assert same(dict(other.state_dict()), dict(before))


def test_load_code_of_one_module_does_not_excuse_the_shape_of_another() -> None:
    """The tensors of a module belong to its own load code, or to that of the modules around it."""
    saved = kept({"m": nn.Sequential(nn.Linear(3, 4), _observer(is_used=True))})
    with pytest.raises(InvalidInput, match=r"m\.0\.weight has shape"):
        saved.plan(State({"m": nn.Sequential(nn.Linear(3, 5), _observer(is_used=False))}))


def test_a_hook_over_live_objects_is_not_rehearsed() -> None:
    """On a copy it would change the live module before anything is verified."""

    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("rows", torch.zeros(0))

        def grow(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
            model.rows = torch.zeros_like(state_dict[f"{prefix}rows"])

        model._register_load_state_dict_pre_hook(grow)
        return model

    model, other = make(), make()
    model.rows = torch.ones(3)
    with pytest.raises(InvalidInput, match=r"m\.rows has shape \[0\]"):
        kept({"m": model}).plan(State({"m": other}))
    assert same(other.rows, torch.zeros(0))
