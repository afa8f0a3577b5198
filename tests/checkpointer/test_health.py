"""Health of checkpoints: written with each save, shown, kept by retention, and chosen by a restore."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sections import Health
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.store import open_store
from holdfast.cli import main
from holdfast.errors import InvalidInput, NotFound
from making import steps_kept
from stage.training import make_checkpointer


def make(home: Path, **options: Any) -> holdfast.Checkpointer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    return make_checkpointer(home, state, memory="64MiB", **options)


def save(ckpt: holdfast.Checkpointer, step: int, loss: float = math.nan, *, nan: bool = False) -> None:
    """Save a step, with a loss of each step before it."""
    if not math.isnan(loss):
        generator = random.Random(step)
        for at in range(step - 99, step + 1):
            ckpt.record(at, loss=loss * (1 + 0.01 * generator.gauss(0, 1)))
    weight = ckpt.state["model"].weight
    with torch.no_grad():
        weight[0, 0] = math.nan if nan else step
    ckpt.save(step).wait_durable()


def health(home: Path, step: int, attempt: int = 1) -> Health:
    return read_manifest(open_store(home), CheckpointId(attempt=attempt, step=step), None).health


def test_a_manifest_has_the_health_of_the_state(tmp_path: Path) -> None:
    with make(tmp_path, keep=None) as ckpt:
        save(ckpt, 1)
        save(ckpt, 100, loss=2.0)
        save(ckpt, 200, loss=2.0, nan=True)
        save(ckpt, 300, loss=40.0)
    assert health(tmp_path, 1).word == "unknown"
    assert health(tmp_path, 1).reasons == ("all tensors are finite", "no loss was recorded")
    assert health(tmp_path, 100).word == "healthy"
    assert health(tmp_path, 200).reasons == ("NaN or infinity in model.weight",)
    (reason,) = health(tmp_path, 300).reasons
    assert reason.startswith("loss is 4")
    assert holdfast.open(tmp_path, step=200).verify().is_good  # saved all the same


@pytest.mark.essential
def test_the_newest_healthy_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    with make(tmp_path, keep=2) as ckpt:
        for step in (100, 200):
            save(ckpt, step, loss=2.0)
        for step in (300, 400, 500, 600):
            save(ckpt, step, loss=2.0, nan=True)
    assert steps_kept(tmp_path) == [200, 500, 600]
    with make(tmp_path, keep=2) as ckpt:
        assert ckpt.restore(healthy=True) == 200
        assert ckpt.state["model"].weight[0, 0] == 200
        save(ckpt, 300, loss=2.0)
        assert health(tmp_path, 300, attempt=2).word == "healthy"
        save(ckpt, 400, loss=2.0)
    assert 200 not in steps_kept(tmp_path)  # no longer the newest healthy one


def test_norms_are_compared_with_those_of_the_attempt_before(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    assert health(tmp_path, 3).word == "unknown"  # two are too few to compare with
    with make(tmp_path) as ckpt:
        ckpt.restore()
        save(ckpt, 4)
        save(ckpt, 5000)  # its weight
    assert health(tmp_path, 4, attempt=2).word == "healthy"
    (reason,) = health(tmp_path, 5000, attempt=2).reasons
    assert reason.startswith("the norm of the parameters is 5000, usually")


def test_steps_continue_from_the_healthy_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        save(ckpt, 100, loss=2.0)
        save(ckpt, 200, loss=2.0, nan=True)
    with make(tmp_path) as ckpt:
        ckpt.restore(healthy=True)
        assert list(ckpt.steps(102)) == [100, 101]
        assert ckpt.restored_step == 100


def test_without_a_healthy_checkpoint_nothing_is_restored(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        assert ckpt.restore(healthy=True) is None  # a new run begins from zero
        save(ckpt, 1)
        save(ckpt, 100, loss=2.0, nan=True)
    with make(tmp_path) as ckpt:
        with pytest.raises(NotFound, match=r"(?s)step 100 of attempt 1 is unhealthy: NaN.*step 1 .* unknown"):
            ckpt.restore(healthy=True)
        assert ckpt.restore() == 100
    with make(tmp_path) as ckpt, pytest.raises(InvalidInput, match="not both"):
        ckpt.restore(100, healthy=True)


def test_the_command_line_shows_health(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make(tmp_path) as ckpt:
        save(ckpt, 100, loss=2.0)
        save(ckpt, 200, loss=2.0, nan=True)
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "HEALTH" in shown
    assert "step 200, attempt 1: unhealthy: NaN or infinity in model.weight" in shown
    assert main(["ls", str(tmp_path), "--healthy", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (only["step"], only["healthy"]) == (100, True)
    assert main(["ls", str(tmp_path), "--healthy"]) == 0
    assert "1 checkpoint not known to be healthy not shown" in capsys.readouterr().out
    assert main(["show", str(tmp_path), "--step", "200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["healthy"], found["health_reasons"]) == (False, ["NaN or infinity in model.weight"])
    assert main(["show", str(tmp_path), "--step", "200"]) == 0
    assert "health: unhealthy (NaN or infinity in model.weight)" in capsys.readouterr().out
