"""torchtitan trainings on gloo ranks: killed, resumed, on another number of ranks, after its own manager."""

# ruff: noqa: RUF012 - the tables of a suite are not changed

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
from adapters import running
from adapters.damage import flip
from adapters.door_suite import KILLED, DoorSuite
from adapters.running import EndedRank
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store import open_store
from stage.training import wait_until

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan is not installed: pip install torchtitan"
)
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("training.py")


def start(folder: Path, steps: int, ranks: int, *, killer: Any = None, **plan: Any) -> list[EndedRank]:
    """Run the training to its end; `killer` has rank 0 or its keeper killed at a failpoint."""
    words = [SCRIPT, folder, json.dumps({"steps": steps, **plan})]
    return running.run_ranks(words, ranks, victim_env=killer)


def train(folder: Path, steps: int, ranks: int = 2, **plan: Any) -> dict[str, Any]:
    """Run the training to its end, and return what rank 0 prints."""
    return running.train_ranks(SCRIPT, folder, ranks, steps=steps, **plan)[0]


class TestManager(DoorSuite):
    """Parameters, both optimizers, schedule, data, counters and dropout."""

    script = SCRIPT
    home = "checkpoint"
    killed = {"plain": ({"steps": 6, "interval": 2}, 5)}
    of_ranks = {f"{victim}": ({"steps": 6, "interval": 2}, 5, victim) for victim in range(2)}
    preempted = {"plain": ({"steps": 8, "interval": 100}, 3)}
    ended = {"whole": ({"steps": 5, "interval": 2, "last_save_model_only": False}, 5)}
    again = ({"steps": 16, "interval": 2}, (3, 6), 12)
    agreed = {"steps": 14, "interval": 100}

    def step_of(self, end: dict[str, Any]) -> int:
        return end["step"]

    def compare(self, resumed: list[dict[str, Any]], unbroken: list[dict[str, Any]]) -> None:
        assert [one["digest"] for one in resumed] == [one["digest"] for one in unbroken]


def test_a_training_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = train(tmp_path / "run", 4, interval=2, last_save_model_only=False)
    for ranks in (3, 1):
        found = train(tmp_path / "run", 4, ranks, interval=2, load_only=True)
        assert found["first"] == 4
        assert found["whole"] == saved["whole"]


def test_a_save_whose_keeper_was_killed_before_its_manifest_is_resumed_from(tmp_path: Path) -> None:
    """By its step too, and on another number of ranks, before anything has written the manifest."""
    whole = train(tmp_path / "whole", 6, interval=2)
    mark = tmp_path / "mark"
    killer = {"HOLDFAST_KILL_AT": "keeper.part", "HOLDFAST_KILL_MARK": str(mark)}
    killed = start(tmp_path / "killed", 6, 2, interval=2, kill_at=3, waits=False, killer=killer)
    assert [one.status for one in killed] == [KILLED] * 2
    wait_until(mark.exists)  # keepers may reach the place after the trainers' end
    home = open_store(str(tmp_path / "killed" / "checkpoint"))
    wait_until(lambda: list_home(home).saved[CheckpointId(attempt=1, step=2)].parts.keys() == {0, 1})
    assert not list_home(home).saved[CheckpointId(attempt=1, step=2)].is_committed
    assert train(tmp_path / "killed", 2, 3, interval=9, load_only=True)["first"] == 2
    assert train(tmp_path / "killed", 2, interval=9, load_step=2, load_only=True)["first"] == 2
    resumed = train(tmp_path / "killed", 6, interval=2)
    assert (resumed["first"], resumed["digest"]) == (2, whole["digest"])


def test_a_newer_checkpoint_of_torchtitan_is_resumed_from(tmp_path: Path) -> None:
    """And then the newer one of Holdfast."""
    stock = train(tmp_path / "run", 4, stock=True, interval=2, last_save_model_only=False)
    resumed = train(tmp_path / "run", 6, interval=2, last_save_model_only=False)
    assert (stock["first"], resumed["first"]) == (0, 4)
    assert train(tmp_path / "run", 6, interval=2)["first"] == 6


def test_damaged_metadata_of_torchtitan_is_named_unless_a_newer_save_exists(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, 1, stock=True, interval=2, last_save_model_only=False)
    metadata = tmp_path / "run" / "checkpoint" / "step-2" / ".metadata"
    content = metadata.read_bytes()
    metadata.write_bytes(b"")
    (ended,) = start(tmp_path / "run", 4, 1, interval=2)
    assert ended.status == 1
    assert "step-2/.metadata, which torchtitan's own manager wrote, is damaged" in ended.errors + ended.output
    metadata.write_bytes(content)
    assert train(tmp_path / "run", 4, 1, interval=2, last_save_model_only=False)["first"] == 2
    metadata.write_bytes(b"")
    assert train(tmp_path / "run", 4, 1, interval=2)["first"] == 4


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, interval=2, last_save_model_only=False)
    for path in (tmp_path / "run" / "checkpoint" / "step-00000004").glob("*.safetensors"):
        flip(path)
    assert train(tmp_path / "run", 4, interval=2)["first"] == 2


def test_the_last_step_has_a_model_in_the_export_dtype_beside_it(tmp_path: Path) -> None:
    train(tmp_path / "run", 3, interval=5, export_dtype="bfloat16")
    dcp_to_torch_save(tmp_path / "run" / "checkpoint" / "step-3", tmp_path / "model.pt")
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    whole = holdfast.open(tmp_path / "run" / "checkpoint")
    assert whole.step == 3
    assert set(exported) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, tensor in exported.items():
        assert torch.equal(tensor, whole[f"model.{name}"].to(torch.bfloat16))


def test_a_folder_with_only_an_exported_model_is_refused(tmp_path: Path) -> None:
    """A run never begins from zero unnoticed."""
    train(tmp_path / "run", 3, stock=True, interval=5)
    ended = start(tmp_path / "run", 3, 2, interval=5)
    assert all(one.status for one in ended)
    assert "step-3, which contains only a model" in ended[0].errors + ended[0].output


def test_an_initial_load_takes_a_model_of_another_home(tmp_path: Path) -> None:
    first = train(tmp_path / "first", 2, interval=1, last_save_model_only=False)
    path = str(tmp_path / "first" / "checkpoint")
    found = train(tmp_path / "second", 0, interval=1, initial_load_path=path)
    assert (found["loaded"], found["first"]) == (True, 0)
    assert found["model"] == first["model"]


def test_excluded_states_and_an_older_step_are_respected(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, interval=2, last_save_model_only=False)
    found = train(tmp_path / "run", 2, interval=9, load_step=2, load_only=True)
    assert found["first"] == 2
    found = train(tmp_path / "run", 0, load_only=True, exclude_from_loading=["train_state"])
    assert (found["loaded"], found["first"]) == (True, 0)


def test_old_checkpoints_are_deleted_and_the_first_step_is_saved(tmp_path: Path) -> None:
    found = train(
        tmp_path / "run",
        8,
        1,
        interval=2,
        keep_latest_k=2,
        enable_first_step_checkpoint=True,
        async_mode="disabled",
    )
    assert found["saved"] == [1, 2, 4, 6, 8]
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoint").glob("step-0*"))
    assert steps == ["step-00000006", "step-00000008"]
