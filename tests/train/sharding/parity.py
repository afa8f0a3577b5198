"""Trains a sharded model beside a whole one, on every rank, and compares losses and gradient norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from train.sharding.models import BATCH, batch, loss_of, make

STEPS = 3
Curve = list[tuple[float, float]]


def train(name: str, model: Any, optimizer: Any, steps: range, *, device: str = "cpu") -> Curve:
    """(loss, gradient norm) of each step, of the whole batch, whatever part of it a rank computes."""
    is_split = any(isinstance(p, DTensor) for p in model.parameters())
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_split else (0, 1)
    curve = []
    for step in steps:
        inputs, targets = (one.chunk(ranks)[rank].to(device) for one in batch(name, step))
        optimizer.zero_grad()
        loss = loss_of(name, model, inputs, targets)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        if is_split:
            dist.all_reduce(total)
            norm = norm.full_tensor()
        curve.append((total.item() / ranks, norm.item()))
    return curve


def optimizer_of(model: Any) -> Any:
    """AdamW, so that moments count too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole_curve(name: str, num_steps: int = STEPS) -> Curve:
    """What one process that has the whole model finds."""
    model = make(name)
    return train(name, model, optimizer_of(model), range(num_steps))


def sharded_curve(rank: int, name: str, knobs: dict[str, Any], device: str = "cpu") -> tuple[Curve, float]:
    """(losses and norms, share of the parameters that this rank keeps)."""
    model = holdfast.shard(make(name), **knobs, device=device, quiet=True)
    assert BATCH % dist.get_world_size() == 0
    told = holdfast.describe(model)
    return train(
        name, model, optimizer_of(model), range(STEPS), device=device
    ), told.local_bytes / told.num_bytes
