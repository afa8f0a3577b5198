"""Several ranks keep and restore the same best checkpoint, also where each has a local folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from elastic.conftest import Worlds
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from stage.training import make_checkpointer

pytestmark = pytest.mark.ranks

KEEP = holdfast.Keep(last=1, best=1, metric="loss")


def make(rank: int, home: Path, weights: torch.Tensor, *, is_local: bool) -> holdfast.Checkpointer:
    local = holdfast.Local(home.with_name(f"local-{rank}"), keep=1) if is_local else None
    place = holdfast.Home(home, every=1000 if is_local else None)
    return make_checkpointer(place, {"w": holdfast.per_rank(weights)}, keep=KEEP, local=local, memory="64MiB")


def train(rank: int, home: Path, is_local: bool) -> None:
    """Save twelve steps; the loss, which rank 0 records, is lowest at step 4."""
    weights = torch.zeros(100)
    with make(rank, home, weights, is_local=is_local) as ckpt:
        for step in range(1, 13):
            ckpt.should_save(step)
            weights.fill_(10 * step + rank)
            ckpt.record(step, loss=abs(step - 4) if rank == 0 else -1.0)
            if step % 2 == 0:
                ckpt.save(step).wait_durable()


def restore_best(rank: int, home: Path, is_local: bool) -> tuple[int | None, float]:
    weights = torch.zeros(100)
    with make(rank, home, weights, is_local=is_local) as ckpt:
        return ckpt.restore(best=True), float(weights[0])


def damage(home: Path, step: int) -> None:
    for path in home.glob(f"step-{step:08d}/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize("is_local", [False, True])
def test_all_ranks_keep_and_restore_the_best(worlds: Worlds, tmp_path: Path, is_local: bool) -> None:
    home = tmp_path / "home"
    worlds(2).run(train, home, is_local)
    assert sorted(candidates(list_home(open_store(home)))) == [(1, 4), (1, 12)]
    assert worlds(2).run(restore_best, home, is_local) == [(4, 40.0), (4, 41.0)]
    assert worlds(2).run(restore_best, home, False) == [(4, 40.0), (4, 41.0)]  # the local folders are lost
    assert holdfast.open(home, best="loss").metrics() == {"loss": 0.0}
    damage(home, 4)
    assert worlds(2).run(restore_best, home, False) == [(12, 120.0), (12, 121.0)]
