"""Trainings that are killed or preempted, compared with unbroken ones of the stock Trainer."""

# ruff: noqa: RUF012 - the tables of a suite are not changed

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs torch-holdfast[transformers]")
pytest.importorskip("accelerate", reason="needs torch-holdfast[transformers]")

import holdfast
from adapters import running
from adapters.digest import digest
from adapters.door_suite import DoorSuite
from holdfast.checkpoint.exchange import export_checkpoint
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from stage.training import wait_until

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
train, train_ranks = functools.partial(running.train, SCRIPT), functools.partial(running.train_ranks, SCRIPT)
BEST = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "save_total_limit": 1}
EPOCHS = {
    **{"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch", "max_steps": -1},
    **{"num_train_epochs": 3, "per_device_train_batch_size": 8},
}


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


STOPS = {
    **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"},
    **{"greater_is_better": True, "load_best_model_at_end": True},
    "restore_callback_states_from_checkpoint": True,
}
EVALUATED = {"arguments": {"eval_strategy": "steps", "eval_steps": 4}}
ACCUMULATED = {"gradient_accumulation_steps": 3, "eval_strategy": "epoch"}


class TestTrainer(DoorSuite):
    script = SCRIPT
    resume = "auto"
    killed = {
        "steps": ({}, 10),
        "best": ({"arguments": BEST}, 10),
        "epochs": ({"arguments": EPOCHS}, 10),
        "accumulation": ({"arguments": ACCUMULATED}, 10),
        "peft": pytest.param(({"kind": "peft"}, 10), marks=needs("peft")),
        "trl": pytest.param(({"kind": "sft"}, 10), marks=needs("trl")),
    }
    of_ranks = {"first": ({}, 10, 0), "second": ({}, 10, 1)}
    preempted = {
        "plain step": (EVALUATED, 9),
        "step with evaluation": (EVALUATED, 12),
        "end of an epoch": (EVALUATED, 16),
    }
    ended = {
        "in an epoch": ({}, 20),
        "at the end of an epoch": ({"arguments": {"max_steps": -1, "num_train_epochs": 1}}, 16),
        "stopped early": ({"arguments": STOPS, "stop_early": 2}, 6),
    }
    again = ({}, (3, 7), 15)
    agreed = {}

    def step_of(self, end: dict[str, Any]) -> int:
        return end["state"][0]


def test_a_run_goes_from_the_stock_trainer_to_holdfast_and_back(tmp_path: Path) -> None:
    """The way back is a folder that the command line makes of the newest checkpoint."""
    unbroken = train(tmp_path / "unbroken", stock=True)
    train(tmp_path / "out", stock=True, status=-9, kill_at=6)
    train(tmp_path / "out", resume=True, status=-9, kill_at=14)
    home, folder = tmp_path / "out" / "holdfast", tmp_path / "out" / "checkpoint-12"
    wait_until(lambda: (1, 12) in candidates(list_home(open_store(home))))  # the keeper completes it
    command = [sys.executable, "-m", "holdfast.cli", "export", str(home), str(folder)]
    command += ["--to", "trainer", "--json"]
    exported = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert exported["step"] == 12
    ended = train(tmp_path / "out", resume=True, stock=True)
    assert {**ended, "log": None} == {**unbroken, "log": None}  # the stock Trainer begins a new log interval


@pytest.mark.ranks
def test_stock_ranks_continue_an_export_of_two_ranks_bit_for_bit(tmp_path: Path) -> None:
    """Its files have the names and values of the Trainer's own ones, those of each rank included."""
    unbroken = train_ranks(tmp_path / "unbroken", 2, stock=True)
    train_ranks(tmp_path / "out", 2, statuses=[-9, 0], kill_at=14)
    home, folder = tmp_path / "out" / "holdfast", tmp_path / "exported" / "checkpoint-12"
    wait_until(lambda: (1, 12) in candidates(list_home(open_store(home))))
    folder.parent.mkdir()
    export_checkpoint(holdfast.open(home, 12), folder, kind="trainer")
    stock = tmp_path / "unbroken" / "checkpoint-12"
    for path in (*stock.glob("*.pt"), *stock.glob("*.pth")):
        wanted, found = (torch.load(one, weights_only=False) for one in (path, folder / path.name))
        assert digest(found) == digest(wanted), path.name
    assert train_ranks(folder.parent, 2, stock=True, resume=True) == unbroken


def test_the_start_after_a_kill_before_any_change_leaves_the_files_of_an_unbroken_run(tmp_path: Path) -> None:
    """Folders of deleted checkpoints are removed in several steps, and files are written in several."""
    arguments = {"max_steps": 8, "save_steps": 2, "save_total_limit": 2}
    plan: dict[str, Any] = {"arguments": arguments, "attach": {"folders": "all"}}
    train(tmp_path / "unbroken", **plan)
    change = every = 7
    out = tmp_path / "out"
    while running.status_of(SCRIPT, out, kill_before=change, **plan) == -9:
        train(out, resume="auto", **plan)
        assert running.names_of_states(out) == running.names_of_states(tmp_path / "unbroken"), change
        shutil.rmtree(out)
        change += every
    assert change > 5 * every
