"""Trainings with DeepSpeed that are killed or preempted, compared with unbroken ones of stock DeepSpeed."""

# ruff: noqa: RUF012 - the tables of a suite are not changed

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")

import holdfast
from adapters.door_suite import DoorSuite
from adapters.running import run_ranks
from holdfast.checkpoint.exchange import export_checkpoint
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from stage.training import wait_until

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts" / "train.py"


def train(
    folder: Path, count: int = 1, *, status: int = 0, kill: str = "", **plan: Any
) -> list[dict[str, Any]]:
    """Train on ranks of one process group, and return the end of the run by rank.

    The dictionary of a rank that did not end has only the step at which it started. All ranks are to end with
    `status`. With -9 it is the plan's rank, which takes the others with it, as a launcher does; `kill` is the
    failpoint at which it is killed, or its keeper.
    """
    victim, mark = plan.get("rank", 0), folder.parent / "mark"
    mark.unlink(missing_ok=True)
    killer = {"HOLDFAST_KILL_AT": kill, "HOLDFAST_KILL_MARK": str(mark)}
    words, env = [SCRIPT, folder, json.dumps(plan)], {"DS_ACCELERATOR": "cpu"}
    ended = run_ranks(words, count, env=env, victim=victim, victim_env=killer)
    checked = [ended[victim]] if status == -9 else ended
    assert {one.status for one in checked} == {status}, [one.errors for one in ended]
    if status == -9 and kill:
        wait_until(mark.exists)  # a keeper may reach the place after its rank's end
    return [_last(one.output) for one in ended]


def _last(output: str) -> dict[str, Any]:
    """Return the last result that a rank has written as a whole."""
    lines = [line for line in output.splitlines(keepends=True) if line.endswith("}\n")]
    return json.loads(lines[-1]) if lines else {}


def assert_continues(resumed: list[dict[str, Any]], unbroken: list[dict[str, Any]]) -> None:
    """Assert that resumed ranks end like unbroken ones, with the same losses since they were resumed."""
    for one, whole in zip(resumed, unbroken, strict=True):
        assert one["losses"] == whole["losses"][one["start"] :]
        assert one["digest"] == whole["digest"]


KINDS = {
    f"{stage} {dtype}": {"stage": stage, "dtype": dtype} for stage in range(4) for dtype in ("fp32", "bf16")
}


class TestEngine(DoorSuite):
    unbroken = {"stock": True, "every": 99}
    killed = {name: ({**plan, "steps": 6, "client_state": True}, 3) for name, plan in KINDS.items()}
    of_ranks = {name: ({**plan, "steps": 6}, 3, plan["stage"] % 2) for name, plan in KINDS.items()}
    preempted = {}  # see below, with and without a function
    ended = {"": ({"stage": 1, "steps": 3}, 3)}
    again = ({"stage": 2, "dtype": "bf16", "steps": 12}, (2, 5), 7)
    agreed = {"stage": 1, "steps": 12}

    def step_of(self, end: dict[str, Any]) -> int:
        return end["start"] + len(end["losses"])

    def train(self, folder: Path, count: int = 1, *, status: int = 0, **plan: Any) -> list[dict[str, Any]]:
        return train(folder, count, status=status, **plan)

    def compare(self, resumed: list[dict[str, Any]], unbroken: list[dict[str, Any]]) -> None:
        assert_continues(resumed, unbroken)


@pytest.mark.ranks
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("client_state", ["function", None])
def test_a_preempted_run_exits_with_75_and_resumes_bit_for_bit(
    tmp_path: Path, count: int, client_state: str | None
) -> None:
    plan: dict[str, Any] = {"stage": 1 if count == 1 else 3, "steps": 8, "client_state": client_state}
    unbroken = train(tmp_path / "unbroken", count, stock=True, every=99, **plan)
    train(tmp_path / "out", count, status=75, kill_at=4, signal=15, every=2, **plan)
    resumed = train(tmp_path / "out", count, resume=True, every=2, **plan)
    assert 4 < resumed[0]["start"] <= 6
    assert_continues(resumed, unbroken)


def test_a_preempted_script_with_a_client_state_saves_at_its_next_save(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"stage": 1, "steps": 9, "every": 3, "client_state": True}
    train(tmp_path / "out", status=75, kill_at=4, signal=15, **plan)
    assert holdfast.open(tmp_path / "out" / "holdfast").step == 6


@pytest.mark.ranks
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_number_of_ranks_loads_the_same_state(
    tmp_path: Path, stage: int, saving: int, loading: int
) -> None:
    plan: dict[str, Any] = {"stage": stage, "dtype": "bf16", "steps": 3}
    saved = train(tmp_path / "out", saving, every=3, **plan)
    loaded = train(tmp_path / "out", loading, resume=True, **plan)
    assert [one["start"] for one in loaded] == [3] * loading
    assert {one["digest"] for one in loaded} == {saved[0]["digest"]}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_stock_ranks_load_an_export_of_as_many_ranks(
    tmp_path: Path, count: int, stage: int, dtype: str
) -> None:
    """Its files are those that DeepSpeed writes, with the same values."""
    plan: dict[str, Any] = {"stage": stage, "dtype": dtype, "steps": 3, "every": 3}
    stock = train(tmp_path / "stock", count, stock=True, **plan)
    saved = train(tmp_path / "out", count, **plan)
    exported = tmp_path / "exported"
    export_checkpoint(holdfast.open(tmp_path / "out" / "holdfast"), exported, kind="deepspeed")
    tag = Path("global_step3")
    found, expected = (
        {path.name for path in (folder / tag).iterdir()} for folder in (exported, tmp_path / "stock")
    )
    assert found == expected
    loaded = train(exported, count, stock=True, resume=True, **plan)
    assert [one["start"] for one in loaded] == [3] * count
    assert [one["digest"] for one in loaded] == [one["digest"] for one in saved]
    assert [one["digest"] for one in loaded] == [one["digest"] for one in stock]


PLACES = (
    *("trainer.staging", "trainer.staged", "trainer.handed", "keeper.received"),
    *("store.written", "keeper.data", "keeper.part", "keeper.manifest"),
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
        assert_continues(self._resume(), self.unbroken)
        for attempt, step in durable(self.folder / "out"):
            home = holdfast.open(self.folder / "out" / "holdfast", step=step, attempt=attempt)
            assert not home.verify().problems

    def _resume(self, **how: Any) -> list[dict[str, Any]]:
        newest = max((step for _, step in durable(self.folder / "out")), default=0)
        ranks = train(self.folder / "out", self.count, resume=True, **self.plan, **how)
        for one in ranks:
            assert one.get("start", newest) >= newest
        return ranks


@pytest.mark.ranks
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


@pytest.mark.ranks
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
