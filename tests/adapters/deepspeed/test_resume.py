"""Trainings with DeepSpeed that are killed or preempted, compared with unbroken ones of stock DeepSpeed."""

# ruff: noqa: RUF012 - the tables of a suite are not changed

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")

import holdfast
from adapters.deepspeed.running import train
from adapters.door_suite import DoorSuite
from holdfast.checkpoint.exchange import export_checkpoint

pytestmark = pytest.mark.slow


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
    assert {path.name for path in (exported / tag).iterdir()} == {
        path.name for path in (tmp_path / "stock" / tag).iterdir()
    }
    loaded = train(exported, count, stock=True, resume=True, **plan)
    assert [one["start"] for one in loaded] == [3] * count
    assert [one["digest"] for one in loaded] == [one["digest"] for one in saved]
    assert [one["digest"] for one in loaded] == [one["digest"] for one in stock]
