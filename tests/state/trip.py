"""Small training set-ups, and a round trip of a state through a checkpoint, for the tests of states."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.checkpoint.format.manifest import Tensor
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.format.values import decode
from holdfast.checkpoint.state import CapturedState, Load, State
from holdfast.checkpoint.state.tensors import dtype_name


class Net(nn.Module):
    """Embedding, a normalized layer with buffers, dropout, and an output layer tied to the embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x))
        return self.out(self.drop(torch.tanh(self.inner(hidden))))


class Stateful:
    """An object with a state of its own, which it returns and takes as it is."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Kept:
    """What a checkpoint keeps of a captured state: copies of the bytes, values as JSON text."""

    def __init__(self, captured: CapturedState) -> None:
        found, layout = captured.tensors, torch.contiguous_format
        self.tensors = {name: t.clone(memory_format=layout) for name, t in found.items()}
        self.specs = {name: Tensor(dtype_name(t.dtype), tuple(t.shape), None) for name, t in found.items()}
        self.tied = dict(captured.structure.tied)
        self.values: dict[str, Any] = copy.deepcopy(captured.values)
        self.text = dumps(self.values)

    def plan(self, state: State, **options: Any) -> Load:
        return state.load(self.specs, self.tied, self.values, **options)

    def fill(self, load: Load) -> Load:
        fill(load, self.tensors)
        return load

    def restore(self, state: State, **options: Any) -> Load:
        load = self.fill(self.plan(state, **options))
        load.finish()
        return load


def fill(load: Load, saved: Mapping[str, torch.Tensor]) -> None:
    """Fill the targets of a load with their parts of saved tensors."""
    for name, target in ((name, one) for name, found in load.targets.items() for one in found):
        part = saved[name] if target.region is None else saved[name][target.region.slices]
        assert target.tensor.is_contiguous()
        assert target.tensor.dtype is part.dtype
        assert target.tensor.shape == part.shape
        assert target.region is None or target.region.num_items
        target.tensor.copy_(part)


def assign(thing: Any, **attributes: Any) -> None:
    """Set attributes of an object, within an expression."""
    for name, value in attributes.items():
        setattr(thing, name, value)


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A world that exists only on paper, as one of its ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def kept(objects: dict[str, Any]) -> Kept:
    return Kept(State(objects).capture())


def batch() -> torch.Tensor:
    return torch.randint(0, 11, (16,))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, after: Callable[[], Any] = int) -> None:
    """Steps with random batches and dropout, so that results depend on the RNG states too."""
    for _ in range(steps):
        x = batch()

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x)
            loss.backward()
            return loss

        optimizer.step(closure)
        after()


def step_once(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Step an optimizer with gradients of ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def training(make: Callable[[Any], Any] = torch.optim.AdamW, *, steps: int = 0) -> dict[str, Any]:
    """A model and its optimizer, after some steps."""
    model = Net()
    objects = {"model": model, "optimizer": make(model.parameters())}
    advance(objects, steps)
    return objects


def advance(objects: Mapping[str, Any], steps: int) -> None:
    """Train a model with its optimizer."""
    train(objects["model"], objects["optimizer"], steps)


def same(a: Any, b: Any) -> bool:
    """Bit equality of two trees of tensors and values."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return whole.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two states are equal to the bit, names, ties, values and RNG included (as far as it is shared)."""
    left, right = State(a).capture(), State(b).capture()
    assert left.tensors.keys() == right.tensors.keys()
    assert left.tensors
    different = [name for name, t in left.tensors.items() if not same(t, right.tensors[name])]
    assert not different
    assert left.structure.tied == right.structure.tied
    assert decode_all(left) == decode_all(right)


def decode_all(captured: CapturedState) -> dict[str, Any]:
    return {key: repr(decode(value)) for key, value in captured.values.items()}
