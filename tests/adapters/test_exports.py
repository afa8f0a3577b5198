"""Exports of the doors' checkpoints, read by stock readers and compared with the live state: all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import running
from adapters.exports import check_exports
from adapters.nebula.running import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
HERE = Path(__file__).parent
BOTH = pytest.mark.parametrize("count", [1, 2])


@BOTH
def test_accelerate(tmp_path: Path, count: int) -> None:
    pytest.importorskip("accelerate", reason="needs torch-holdfast[accelerate]")
    script = HERE / "accelerate" / "scripts" / "train.py"
    running.train_ranks(script, tmp_path / "out", count, steps=6, every=3, live=True)
    live = torch.load(tmp_path / "out" / "live-0.pt", weights_only=False)
    home = tmp_path / "out" / "checkpoints" / "holdfast"
    check_exports(home, live, tmp_path, bookkeeping=["loader", "folders", "rng"])


@BOTH
@pytest.mark.fsdp2_on_cpu
def test_torchtitan(tmp_path: Path, count: int) -> None:
    pytest.importorskip("torchtitan.components.checkpointer", reason="needs torch-holdfast[torchtitan]")
    script = HERE / "torchtitan" / "training.py"
    plan: dict[str, Any] = {"steps": 4, "interval": 2, "last_save_model_only": False, "live": True}
    running.train_ranks(script, tmp_path / "out", count, **plan)
    live = torch.load(tmp_path / "out" / "live-0.pt", weights_only=False)
    check_exports(tmp_path / "out" / "checkpoint", live, tmp_path, bookkeeping=["rng"])


@BOTH
def test_nebula(tmp_path: Path, count: int) -> None:
    """Each rank has a partition that no other one has; of those of the same name rank 0's are exported."""
    run_ranks(count, tmp_path / "home", "all_commit", 3, 0, "raw")

    def state(rank: int) -> dict[str, Any]:
        return {"weights": torch.full((1000,), 30.0 + rank), "step": 3, "rank": rank}

    live = {"model": state(0), "shard": state(0), **{f"zero_{rank}": state(rank) for rank in range(count)}}
    check_exports(tmp_path / "home", live, tmp_path, bookkeeping=["nebula", "rng"])
