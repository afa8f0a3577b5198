"""The first FSDP tutorial: on several numbers of ranks, killed and resumed on others, launched as a job."""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.running import EXAMPLES, LIMIT_S, ROOT, environment, run_on

SCRIPT = EXAMPLES / "mnist_fsdp" / "train.py"
SHORT = ("--data", "digits", "--side", "8", "--epochs", "2", "--no-dropout", "--every", "10")
STEPS = 44  # two epochs of 1437 images in batches of 64

pytestmark = pytest.mark.ranks


def train(home: Path, ranks: int, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the example on so many ranks to its end, whatever that is."""
    return run_on(ranks, SCRIPT, "--home", home, *SHORT, *words, **env)


def table(home: Path) -> dict[str, dict[str, Any]]:
    """The rows that the example has left, by way."""
    return {row["way"]: row for row in json.loads((home / "table.json").read_text())}


@pytest.mark.slow
def test_two_ranks_train_in_two_ways_and_leave_a_table_and_a_plot(tmp_path: Path) -> None:
    """The ways differ in where parameters are, not in what is learned."""
    home = tmp_path / "home"
    done = train(home, 2, "--ways", "ddp", "fsdp-wrapped")
    assert done.returncode == 0, done.stderr
    rows = table(home)
    assert list(rows) == ["ddp", "fsdp-wrapped"]
    ddp, wrapped = rows.values()
    assert ddp["curve"] == pytest.approx(wrapped["curve"], rel=1e-3)
    assert len(ddp["curve"]) == STEPS
    assert ddp["curve"][-1] < ddp["curve"][0] / 4
    assert ddp["accuracy"] > 0.8
    for half, whole in zip(wrapped["kept_bytes"], ddp["kept_bytes"], strict=True):
        assert half < 0.6 * whole
    for row in rows.values():
        assert all(map(operator.gt, row["peak_bytes"], row["kept_bytes"]))
    assert re.search(r"unit fc1: 32,896 parameters, 65.8 kB of 132 kB here", done.stderr)
    assert "Loss of each step" in (home / "plot.svg").read_text()
    assert re.search(r"^ddp +[\d.]+ s +[\d.]+ +[\d.]+%", done.stdout, re.M)


@pytest.mark.slow
def test_killed_and_resumed_on_other_numbers_of_ranks_it_follows_the_same_curve(tmp_path: Path) -> None:
    """Four ranks are killed, two as well, one ends it; no step of the curve is another."""
    ways = ("--ways", "fsdp-offloaded")
    assert train(tmp_path / "straight", 2, *ways).returncode == 0
    home = tmp_path / "home"
    for number, ranks in enumerate((4, 2)):
        mark = tmp_path / f"mark-{number}"
        killed = train(home, ranks, *ways, HOLDFAST_KILL_AT="trainer.handed:2", HOLDFAST_KILL_MARK=str(mark))
        assert killed.returncode != 0
        assert mark.exists()
    ended = train(home, 1, *ways)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"restored step (10|20|30|40) from", ended.stderr)
    (straight,), (broken,) = table(tmp_path / "straight").values(), table(home).values()
    assert broken["curve"] == pytest.approx(straight["curve"], rel=1e-2)  # rounding grows from step to step
    assert broken["accuracy"] == pytest.approx(straight["accuracy"], abs=0.01)
    assert broken["ranks"] == 1


@pytest.mark.slow
def test_it_runs_as_a_job(tmp_path: Path) -> None:
    env = {**environment(), "HOLDFAST_STATE": str(tmp_path / "state")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # torchrun of this environment
    task = str(SCRIPT.with_name("task.yaml"))
    words = ["launch", task, "--attach", "--env", "EPOCHS=1", "--env", "RANKS=2"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT_S, "check": False}
    done = subprocess.run([sys.executable, "-m", "holdfast.cli", *words], cwd=ROOT, env=env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    for way in ("ddp", "fsdp", "fsdp-wrapped", "fsdp-offloaded"):
        assert re.search(rf"^{way} +[\d.]+ s", done.stdout, re.M)
