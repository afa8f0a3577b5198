"""Several ranks search together: the one with the least memory decides, and a failure ends all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint.state.sharding import local_of
from stage.ranks import run_ranks
from train.batch.training import Training

pytestmark = pytest.mark.ranks


def test_the_rank_with_the_least_memory_decides_for_all() -> None:
    found = run_ranks(2, with_limits, 8_000_000, 3_000_000)
    assert found[0] == found[1], found
    assert found[0]["limit_bytes"] == 3_000_000
    assert found[0]["world_size"] == 2
    peaks = {size: peak for size, peak, fits, _ in found[0]["probes"] if fits}
    assert 2_850_000 < peaks[found[0]["largest"]] <= 3_000_000


def test_memory_that_runs_out_on_one_rank_bounds_all_ranks() -> None:
    found = run_ranks(2, running_out)
    assert found[0] == found[1], found
    assert found[0] in (48, 49, 50)


def test_a_failing_step_on_one_rank_ends_the_search_on_all() -> None:
    errors = run_ranks(2, failing)
    assert "RetryLater: fit_batch() stopped because the step failed on rank 1" in errors[0]
    assert "ValueError: a bad batch" in errors[0]
    assert "ValueError: a bad batch" in errors[1]
    assert "RetryLater" not in errors[1]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.fsdp2_on_cpu)])
def test_models_that_communicate_in_their_step_are_measured_and_restored(kind: str) -> None:
    found = run_ranks(2, wrapped, kind)
    assert found[0] == found[1], found
    assert found[0]["largest"] > 50
    assert all(peak <= 3_000_000 for _, peak, fits, _ in found[0]["probes"] if fits and peak is not None)


def with_limits(rank: int, *limits: int) -> dict[str, Any]:
    """Search with a different memory limit on each rank."""
    training = Training()
    before = training.fingerprint()
    found = training.fit(memory_limit=limits[rank], quiet=True)
    assert training.fingerprint() == before
    return found.state_dict()


def running_out(rank: int) -> int:
    """Return the largest batch if rank 1 alone runs out of memory."""
    training = Training()

    def step(batch: dict[str, Any]) -> None:
        if rank == 1 and len(batch["x"]) > 50:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        training.step(batch)

    return holdfast.fit_batch(step, training.sample, training.state, quiet=True).largest


def failing(rank: int) -> None:
    """Search while the step of rank 1 fails at some size."""
    training = Training()

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
        return [local_of(one).detach().numpy().tobytes() for one in (*model.parameters(), *states)]

    sample = torch.randn(8, 64)
    step(sample)
    before = bits()
    found = holdfast.fit_batch(
        step, sample, {"model": model, "optimizer": optimizer}, memory_limit="3MB", timed_steps=1, quiet=True
    )
    assert bits() == before
    return found.state_dict()
