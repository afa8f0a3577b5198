"""Losses and gradient norms of a sharded and an unsharded model."""

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
    """Return loss and gradient norm of each step, of the global batch."""
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
    """Return AdamW, so that its moments are compared too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole_curve(name: str, num_steps: int = STEPS) -> Curve:
    """Return the curve of one process with the unsharded model."""
    model = make(name)
    return train(name, model, optimizer_of(model), range(num_steps))


def sharded_curve(rank: int, name: str, options: dict[str, Any], device: str = "cpu") -> tuple[Curve, float]:
    """Return losses and norms, and this rank's share of the parameters."""
    model = holdfast.shard(make(name), **options, device=device, quiet=True)
    assert BATCH % dist.get_world_size() == 0
    description = holdfast.describe(model)
    curve = train(name, model, optimizer_of(model), range(STEPS), device=device)
    return curve, description.local_bytes / description.num_bytes
