"""Searches for a batch on several ranks, to be run by each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.train.batch.holdings import local
from train.batch.training import Training


def with_limits(rank: int, *limits: int) -> dict[str, Any]:
    """What is found where each rank has memory of its own."""
    training = Training()
    before = training.fingerprint()
    found = holdfast.fit_batch(training.step, training.sample, training.state, limit=limits[rank], quiet=True)
    assert training.fingerprint() == before
    return found.state_dict()


def running_out(rank: int) -> int:
    """The largest that is found where rank 1 alone runs out of memory."""
    training = Training(reads=True)

    def step(batch: dict[str, Any]) -> None:
        if rank == 1 and len(batch["x"]) > 50:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        training.step(batch)

    return holdfast.fit_batch(step, training.sample, training.state, quiet=True).largest


def failing(rank: int) -> None:
    """Rank 1's step fails at some size."""
    training = Training(reads=True)

    def step(batch: dict[str, Any]) -> None:
        if rank == 1 and len(batch["x"]) >= 32:
            raise ValueError("a bad batch")
        training.step(batch)

    holdfast.fit_batch(step, training.sample, training.state, limit="8MB")


def wrapped(rank: int, kind: str) -> dict[str, Any]:
    """What is found for a model whose step talks to the other ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    if kind == "fsdp":
        fully_shard(net)
    model = DistributedDataParallel(net) if kind == "ddp" else net
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def bits() -> list[bytes]:
        states = [one for state in optimizer.state.values() for one in state.values()]
        return [local(one).numpy().tobytes() for one in (*model.parameters(), *states)]

    sample = torch.randn(8, 64)
    step(sample)
    before = bits()
    found = holdfast.fit_batch(
        step, sample, {"model": model, "optimizer": optimizer}, limit="3MB", rounds=1, quiet=True
    )
    assert bits() == before
    return found.state_dict()
