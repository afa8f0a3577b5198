"""Trainings under Ray Train: a killed worker, and a node that is reclaimed after a notice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from adapters.exports import check_exports
from nursery import Nursery, shared

pytest.importorskip("ray.train", reason="needs torch-holdfast[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.ranks]

TRAINER = Path(__file__).parent / "ray_trainer.py"


def run(nursery: Nursery, folder: Path, scenario: str, total: int, num_workers: int) -> dict[str, Any]:
    """Run a training to its end, and return what it prints."""
    folder.mkdir()
    env = {**os.environ, "RAY_TMPDIR": "/tmp", "HOLDFAST_PREEMPTION": "auto"}
    words = ["-W", "ignore", str(TRAINER), scenario, str(folder), str(total), str(num_workers)]
    child = nursery.start(words, folder / "output.txt", env=env)
    assert child.wait() == 0, child.said()
    return json.loads(child.said().splitlines()[-1])


def progress(folder: Path) -> list[int]:
    """Return the steps that were completed, in order."""
    return [int(line.split()[1]) for line in (folder / "progress.log").read_text().splitlines()]


@pytest.fixture
def nursery() -> Nursery:
    return shared()


def test_a_killed_worker_is_resumed_by_ray_bit_for_bit(nursery: Nursery, tmp_path: Path) -> None:
    whole = run(nursery, tmp_path / "whole", "whole", 30, 2)
    killed = run(nursery, tmp_path / "killed", "killed", 30, 2)
    assert killed["digest"] == whole["digest"]
    assert progress(tmp_path / "killed") == [*range(1, 19), *range(16, 31)]
    assert (killed["step"], killed["num_tensors"]) == (30, whole["num_tensors"])
    assert killed["ray_bytes"] < 4096  # its checkpoints contain only a home and a step


def test_a_notice_of_ray_saves_once_and_another_node_resumes(nursery: Nursery, tmp_path: Path) -> None:
    """The Checkpointer saves every 1000 steps, so the only save before the end is that of the notice."""
    whole = run(nursery, tmp_path / "whole", "whole", 60, 1)
    reclaimed = run(nursery, tmp_path / "reclaimed", "reclaimed", 60, 1)
    assert reclaimed["digest"] == whole["digest"]
    steps = progress(tmp_path / "reclaimed")
    (restart,) = (number for number in range(1, len(steps)) if steps[number] <= steps[number - 1])
    assert steps[restart] > 1
    assert holdfast.open(tmp_path / "reclaimed" / "home").step == 60


@pytest.mark.parametrize("count", [1, 2])
def test_exports_have_every_key(nursery: Nursery, tmp_path: Path, count: int) -> None:
    run(nursery, tmp_path / "whole", "whole", 4, count)
    live = torch.load(tmp_path / "whole" / "live.pt", weights_only=True)
    check_exports(tmp_path / "whole" / "home", live, tmp_path, bookkeeping=["rng"])


def test_a_training_killed_after_its_last_save_trains_no_further_step(
    nursery: Nursery, tmp_path: Path
) -> None:
    """A worker is killed once the last step is durable, and Ray starts all again."""
    whole = run(nursery, tmp_path / "whole", "whole", 10, 2)
    killed = run(nursery, tmp_path / "killed", "ended", 10, 2)
    assert killed["digest"] == whole["digest"]
    assert progress(tmp_path / "killed") == [*range(1, 11)]
