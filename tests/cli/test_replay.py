"""`holdfast replay` on real scripts: sound spans pass, and a changed bit of the record is reported."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import flip
from holdfast.cli.experiment import DifferenceRow
from holdfast.cli.replay import DIFFERS, RANDOM, SOUND, first_difference, judge
from nursery import shared

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 600.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

SCRIPT = """
import os, struct, sys
import torch
import holdfast

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
flip_at, home = int(os.environ.get("FLIP_AT", "-1")), os.environ.get("OWN_HOME", "home")
noise = int.from_bytes(os.urandom(4), "little") if os.environ.get("NOISY") else 0
source = torch.Generator().manual_seed(noise)
with holdfast.Checkpointer(home, {"model": model, "optimizer": optimizer}, every=4, keep=None) as ckpt:
    for step in ckpt.steps(16):
        batch = torch.randn(8, 4) + torch.randn(8, 4, generator=source) * (noise > 0)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == flip_at:  # a bit of the mantissa of one weight
            model[0].weight.data.view(torch.int32)[2, 1] ^= 1 << 18
        ckpt.record(loss=loss)
"""


def train(folder: Path, **env: str) -> None:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = shared().run(["train.py"], cwd=folder, env=env, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr


def replay(folder: Path, *words: str, **env: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the JSON report and stderr."""
    command = ["-m", "holdfast.cli", "replay", "home", "--json", *words]
    command += ["--", *shared().python, "train.py"]
    done = shared().run(command, cwd=folder, env=env, timeout_s=LIMIT_S)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_flipped_bit_is_found_in_its_span_and_the_others_are_sound(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, FLIP_AT="9")
    before = contents(run)

    status, report, result = replay(run)
    assert (status, report["verdict"], report["step"], report["to_step"]) == (0, SOUND, 12, 16), result
    status, report, result = replay(run, "--step", "8")
    assert (status, report["verdict"], report["to_step"]) == (1, DIFFERS, 12), result

    assert any(row["key"] == "model.0.weight" for row in report["differences"])
    assert report["metric"]["name"] == "loss"
    assert report["metric"]["step"] == 11  # step 10 has the bit flipped after its loss
    assert contents(run) == before


@pytest.mark.slow
def test_a_training_that_is_not_deterministic_accuses_nobody(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, NOISY="1")
    status, report, result = replay(run, "--to", "8", NOISY="1")
    assert (status, report["verdict"], report["step"]) == (3, RANDOM, 4), result
    assert not report["matches_once"]


def test_a_script_that_uses_another_home_is_an_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    status, report, result = replay(run, OWN_HOME="elsewhere")
    assert (status, report) == (2, {})
    assert "did not restore step 12, but nothing" in result
    assert "Give it the arguments that the run had." in result


def test_a_damaged_first_checkpoint_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run)
    (data,) = (run / "home" / "step-00000008").glob("*.safetensors")
    flip(data, at=-9)
    status, _, result = replay(run, "--step", "8")
    assert status == 2
    assert "step-00000008/rank-00000-a0001.safetensors" in result
    assert "damaged in chunk 0" in result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "5"), "does not hold a complete checkpoint of step 5"),
        (("--step", "16"), "needs two checkpoints"),
        (("--to", "4"), "needs two checkpoints"),
        (("--step", "12", "--to", "8"), "needs two checkpoints"),
    ],
)
def test_steps_that_are_not_a_span_are_errors(trained: Path, words: tuple[str, ...], message: str) -> None:
    status, _, result = replay(trained, *words)
    assert status == 2
    assert message in result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("replay") / "run"
    train(run)
    return run


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_are_replayed(tmp_path: Path) -> None:
    command = [*TORCHRUN, str(ROOT / "examples" / "02_ddp.py")]
    done = shared().run(["-c", f"import subprocess; subprocess.run({command!r}, check=True)"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ["-m", "holdfast.cli", "replay", "runs/ddp", "--json", "--", *command]
    done = shared().run(words, cwd=tmp_path, timeout_s=LIMIT_S)
    report = json.loads(done.stdout or "{}")
    assert (done.returncode, report["verdict"], report["world_size"]) == (0, SOUND, 2), done.stderr


# -- the verdict, from comparisons -----------------------------------------------------------------------


def found(*keys: str, values: tuple[str, ...] = ()) -> list[DifferenceRow]:
    tensors = [DifferenceRow(key, "1 of 2 numbers") for key in keys]
    return [*tensors, *(DifferenceRow(key, "1 and 2", is_tensor=False) for key in values)]


SAME = found()


@pytest.mark.parametrize(
    ("record", "again", "between", "expected"),
    [
        (SAME, [], [], (SOUND, False)),
        (found("w"), found("w"), SAME, (DIFFERS, False)),
        (found("w"), found("w", "b"), found("b"), (RANDOM, False)),
        (found("w"), SAME, found("w"), (RANDOM, True)),
        (found(values=("time",)), found(values=("time",)), found(values=("time",)), (SOUND, False)),
        (found("w", values=("time",)), found("w"), found(values=("time",)), (DIFFERS, False)),
        (found("rng.torch"), found("rng.torch"), found("rng.torch"), (SOUND, False)),
    ],
    ids=["equal", "wrong", "random", "once", "a time", "wrong beside a time", "unseeded and unused"],
)
def test_the_verdict_follows_from_three_comparisons(
    record: list[DifferenceRow],
    again: list[DifferenceRow],
    between: list[DifferenceRow],
    expected: tuple[str, bool],
) -> None:
    verdict = judge(record, again, between)
    assert (verdict.name, verdict.matches_once) == expected
    assert "time" not in {row.key for row in verdict.differences}


def test_the_first_metric_that_differs_is_found_and_nan_equals_nan() -> None:
    recorded = {5: {"loss": 1.0, "norm": math.nan}, 6: {"loss": 2.0}, 7: {"loss": 3.0}}
    replayed = {5: {"loss": 1.0, "norm": math.nan}, 6: {"loss": 2.5}, 8: {"loss": 9.0}}
    found = first_difference(recorded, replayed)
    assert found == {"step": 6, "name": "loss", "recorded": 2.0, "replayed": 2.5}
    assert first_difference(recorded, {5: recorded[5]}) is None
