"""Trainings that are killed or preempted, compared with unbroken ones of the stock Trainer."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
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


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("gpt", {}),
        ("gpt", BEST),
        ("gpt", EPOCHS),
        ("gpt", {"gradient_accumulation_steps": 3, "eval_strategy": "epoch"}),
        pytest.param("peft", {}, marks=needs("peft")),
        pytest.param("sft", {}, marks=needs("trl")),
    ],
    ids=["steps", "best", "epochs", "accumulation", "peft", "trl"],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, kind: str, arguments: dict[str, Any]) -> None:
    plan: dict[str, Any] = {"kind": kind, "arguments": arguments}
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=-9, kill_at=10, **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken


STOPS = {
    **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"},
    **{"greater_is_better": True, "load_best_model_at_end": True},
    "restore_callback_states_from_checkpoint": True,
}


@pytest.mark.parametrize(
    ("step", "plan"),
    [
        (20, {}),
        (16, {"arguments": {"max_steps": -1, "num_train_epochs": 1}}),
        (6, {"arguments": STOPS, "stop_early": 2}),
    ],
    ids=["in an epoch", "at the end of an epoch", "stopped early"],
)
def test_a_run_killed_after_its_last_save_trains_no_further_step(
    tmp_path: Path, step: int, plan: dict[str, Any]
) -> None:
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=-9, kill_at=step, is_saved=True, **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken
    assert unbroken["state"][0] == step


def test_a_run_that_is_killed_again_and_again_resumes_bit_for_bit(tmp_path: Path) -> None:
    draw = random.Random(8)
    unbroken = train(tmp_path / "unbroken", stock=True)
    step = 0
    while step < 15:
        step += draw.randint(3, 7)
        train(tmp_path / "out", status=-9, kill_at=step, resume="auto")
    assert train(tmp_path / "out", resume="auto") == unbroken


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_resume_bit_for_bit(tmp_path: Path, victim: int) -> None:
    unbroken = train_ranks(tmp_path / "unbroken", 2, stock=True)
    statuses = [-9 if rank == victim else 0 for rank in range(2)]
    train_ranks(tmp_path / "out", 2, statuses=statuses, kill_at=10, rank=victim)
    assert train_ranks(tmp_path / "out", 2, resume=True) == unbroken


@pytest.mark.parametrize("step", [9, 12, 16], ids=["plain step", "step with evaluation", "end of an epoch"])
def test_a_preempted_run_exits_with_75_and_resumes_bit_for_bit(tmp_path: Path, step: int) -> None:
    plan: dict[str, Any] = {"arguments": {"eval_strategy": "steps", "eval_steps": 4}}
    unbroken = train(tmp_path / "unbroken", stock=True, **plan)
    train(tmp_path / "out", status=75, kill_at=step, signal=15, **plan)
    assert holdfast.open(tmp_path / "out" / "holdfast").step == step
    assert train(tmp_path / "out", resume=True, **plan) == unbroken


@pytest.mark.ranks
def test_two_ranks_agree_on_a_notice_that_one_of_them_gets(tmp_path: Path) -> None:
    unbroken = train_ranks(tmp_path / "unbroken", 2, stock=True)
    train_ranks(tmp_path / "out", 2, statuses=[75, 75], kill_at=9, signal=15, rank=1)
    assert train_ranks(tmp_path / "out", 2, resume=True) == unbroken


def test_a_run_goes_from_the_stock_trainer_to_holdfast_and_back(tmp_path: Path) -> None:
    """The way back is a folder that the command line makes of the newest checkpoint."""
    unbroken = train(tmp_path / "unbroken", stock=True)
    train(tmp_path / "out", stock=True, status=-9, kill_at=6)
    train(tmp_path / "out", resume=True, status=-9, kill_at=14)
    home, folder = tmp_path / "out" / "holdfast", tmp_path / "out" / "checkpoint-12"
    wait_until(lambda: (1, 12) in candidates(list_home(open_store(home))))  # the keeper completes it
    command = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "export",
        str(home),
        str(folder),
        "--to",
        "trainer",
        "--json",
    ]
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
