"""DeepSpeed trainings that are killed within a save or at random moments, and resumed to the end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")

import holdfast
from adapters.deepspeed.running import train
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
PLACES = (
    "trainer.staging",
    "trainer.staged",
    "trainer.handed",
    "keeper.received",
    "store.written",
    "keeper.data",
    "keeper.part",
    "keeper.manifest",
)
KILLS = 6
"""Random kills of a run."""


def durable(folder: Path) -> list[tuple[int, int]]:
    """Return (attempt, step) of the checkpoints that are complete, the newest first."""
    home = folder / "holdfast"
    return list(candidates(list_home(open_store(str(home))))) if home.exists() else []


class Run:
    """A run that is killed again and again."""

    def __init__(self, folder: Path, count: int, plan: dict[str, Any]) -> None:
        self.folder, self.count, self.plan = folder, count, plan
        self.unbroken = train(folder / "unbroken", count, stock=True, every=10**6, **plan)

    def kill(self, rank: int, **how: Any) -> None:
        """Resume the run until a rank is killed. It must not start before a durable save."""
        self._resume(status=-9, rank=rank, **how)

    def end(self) -> None:
        """Resume the run to its end, which must be that of an unbroken one."""
        ended = self._resume()
        for one, whole in zip(ended, self.unbroken, strict=True):
            assert one["losses"] == whole["losses"][one["start"] :]
            assert one["digest"] == whole["digest"]
        for attempt, step in durable(self.folder / "out"):
            home = holdfast.open(self.folder / "out" / "holdfast", step=step, attempt=attempt)
            assert not home.verify().problems

    def _resume(self, **how: Any) -> list[dict[str, Any]]:
        newest = max((step for _, step in durable(self.folder / "out")), default=0)
        ranks = train(self.folder / "out", self.count, resume=True, **self.plan, **how)
        for one in ranks:
            assert one.get("start", newest) >= newest
        return ranks


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_is_killed_in_each_part_of_a_save_ends_bit_for_bit(
    tmp_path: Path, stage: int, count: int
) -> None:
    run = Run(tmp_path, count, {"stage": stage, "dtype": "bf16", "steps": 8 * len(PLACES)})
    for number, place in enumerate(PLACES):
        # After the kill of a keeper, its rank is killed too. Only rank 0's keeper writes manifests.
        rank = 0 if place == "keeper.manifest" else number % count
        run.kill(rank, kill=f"{place}:2", lives=6)
    run.end()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_is_killed_at_random_moments_ends_bit_for_bit(
    tmp_path: Path, stage: int, count: int
) -> None:
    draw = random.Random(stage + 10 * count)
    run = Run(tmp_path, count, {"stage": stage, "dtype": "bf16", "steps": 20 * KILLS})
    for _ in range(KILLS):
        run.kill(draw.randrange(count), lives=draw.randint(1, 3), delay_s=draw.random() * 0.1)
    run.end()
