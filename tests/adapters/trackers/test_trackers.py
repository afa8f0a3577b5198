"""Trackers: the stored curves after a kill and after a rollback, and the record of the newest step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nursery
from adapters.trackers.stored import read
from adapters.trackers.training import attach
from checkpointer.skipping import GO_BACK, Story
from holdfast.adapters.trackers import NONE, StepRecord
from holdfast.errors import Corrupt
from stage.training import make_checkpointer, wait_until

SCRIPT = str(Path(__file__).with_name("training.py"))
NEEDS = {"mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}


@pytest.fixture(params=list(NEEDS))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip(NEEDS[request.param])
    return request.param


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore", "error::holdfast.errors.SaveWarning")  # those of the libraries
def test_a_killed_training_continues_its_curve(library: str, tmp_path: Path) -> None:
    home, folder, env = tmp_path / "home", tmp_path / "logs", dict(os.environ)
    folder.mkdir()
    arguments = ["-W", "ignore", SCRIPT, library, str(home), str(folder)]
    child = nursery.shared().start([*arguments, "40", "25"], tmp_path / "output", env=env)
    newest = 23 if library == "wandb" else 24  # a row is complete once the next one begins
    wait_until(lambda: (newest, 1000 + newest) in read(library, folder).get("loss", []))
    child.kill()
    assert child.wait() == -signal.SIGKILL
    again = nursery.shared().run([*arguments, "40"], env=env)
    assert again.returncode == 0, again.stderr
    found = read(library, folder)
    first_of_second = 20 if library == "tensorboard" else newest + 1
    assert found["loss"] == [(one, one + 1000 * (1 + (one >= first_of_second))) for one in range(40)]
    assert found["holdfast/restores"][-1][1] == 1
    assert found["holdfast/steps_lost"][-1][1] == 5
    assert 0 < found["holdfast/goodput"][-1][1] <= 1


@pytest.mark.filterwarnings("ignore", "error::holdfast.errors.SaveWarning")  # those of the libraries
def test_a_rollback_does_not_double_steps(library: str, tmp_path: Path) -> None:
    story, folder = Story(tmp_path / "home", bad=range(400, 408 + 4)), tmp_path / "logs"
    folder.mkdir()
    logged: dict[int, list[int]] = {}
    ckpt = make_checkpointer(story.home, story.state, watches=[GO_BACK], every=10, keep=3)
    with ckpt, attach(library, ckpt, folder) as tracker:
        for step in ckpt.steps(150):
            story.step(ckpt)
            logged.setdefault(step, []).append(ckpt.attempt or 0)
            tracker.log({"loss": ckpt.attempt or 0}, step=step)
    assert max(map(len, logged.values())) > 1, "no step was done again"
    found = read(library, folder)
    counting = -1 if library == "tensorboard" else 0
    assert found["loss"] == [(step, logged[step][counting]) for step in range(150)]
    if library == "mlflow":
        repeated = [(step, numbers[1]) for step, numbers in logged.items() if len(numbers) > 1]
        assert found["loss-attempt-2"] == repeated
    assert found["holdfast/rollbacks"][-1][1] == 1


@given(steps=st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_the_newest_step_is_read_again(steps: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("record") / "step"
    for step in steps:
        StepRecord(path).raise_to(step)
    assert StepRecord(path).step == (steps[-1] if steps else NONE)


@pytest.mark.parametrize("contents", [b"12\n", b"1" * 21, b"x" * 20 + b"\n", b"1" * 20 + b"\n1"])
def test_other_contents_are_refused(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step"
    path.write_bytes(contents)
    with pytest.raises(Corrupt, match="delete it"):
        StepRecord(path)
    assert path.read_bytes() == contents


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "step").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        StepRecord(tmp_path / "step")
    assert not (tmp_path / "other").exists()


def test_a_step_is_recorded_after_the_folder_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = StepRecord(Path("step"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    record.raise_to(5)
    assert StepRecord(tmp_path / "step").step == 5
