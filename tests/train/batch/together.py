"""Functions that search for a batch on several ranks; every rank runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.train.batch.training_state import local
from train.batch.training import Training


def with_limits(rank: int, *limits: int) -> dict[str, Any]:
    """Search with a different memory limit on each rank."""
    training = Training()
    before = training.fingerprint()
    found = training.fit(memory_limit=limits[rank], quiet=True)
    assert training.fingerprint() == before
    return found.state_dict()


def running_out(rank: int) -> int:
    """Return the largest batch if rank 1 alone runs out of memory."""
    training = Training(reads=True)

    def step(batch: dict[str, Any]) -> None:
        if rank == 1 and len(batch["x"]) > 50:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        training.step(batch)

    return holdfast.fit_batch(step, training.sample, training.state, quiet=True).largest


def failing(rank: int) -> None:
    """Search while the step of rank 1 fails at some size."""
    training = Training(reads=True)

    def step(batch: dict[str, Any]) -> None:
        if rank == 1 and len(batch["x"]) >= 32:
            raise ValueError("a bad batch")
        training.step(batch)

    holdfast.fit_batch(step, training.sample, training.state, memory_limit="8MB")


def wrapped(rank: int, kind: str) -> dict[str, Any]:
    """Search for a model whose step communicates with the other ranks."""
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
        step, sample, {"model": model, "optimizer": optimizer}, memory_limit="3MB", timed_steps=1, quiet=True
    )
    assert bits() == before
    return found.state_dict()
