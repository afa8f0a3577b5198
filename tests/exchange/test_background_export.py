"""Exports in the background: they begin after a save, and fail in public."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.checkpoint.exchange import export_in_background
from holdfast.checkpoint.format import names
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.store import open_store
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, RetryLater, SaveWarning
from making import flip
from stage.training import make_checkpointer


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a model and a number as step 1."""
    with make_checkpointer(tmp_path / "home", {"model": torch.nn.Linear(64, 64), "epoch": 3}) as ckpt:
        ckpt.save(1)
    return tmp_path / "home"


def test_an_export_follows_its_save_while_training_continues(tmp_path: Path) -> None:
    """It has the weights of that step, not those that training has made of them since."""
    model = torch.nn.Linear(64, 64)
    weight = model.weight.detach().clone()
    with make_checkpointer(tmp_path / "home", {"model": model}) as ckpt:
        save = ckpt.save(1)
        export = export_in_background(
            ckpt.home, tmp_path / "hf", after=save, kind="hf", only=["model"], rename={"model": ""}
        )
        save.wait_staged()
        with torch.no_grad():
            model.weight.add_(1)
        done = export.result()
    assert (done.step, done.kind, done.num_tensors) == (1, "hf", 2)
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["weight"], weight)
    assert export.done()
    assert export.exception() is None
    assert done.num_bytes == 64 * 65 * 4


def test_an_export_waits_for_its_save(home: Path, tmp_path: Path) -> None:
    save = Save(1)
    export = export_in_background(home, tmp_path / "out.pt", after=save, kind="torch")
    assert not export.cancel()
    with pytest.raises(FutureTimeoutError):
        export.result(timeout=0.01)
    assert not (tmp_path / "out.pt").exists()
    save.mark_durable()
    save.mark_home()
    export.result()
    assert torch.load(tmp_path / "out.pt", weights_only=True)["epoch"] == 3


def test_a_failed_save_is_not_exported(home: Path, tmp_path: Path) -> None:
    save, error = Save(1), RetryLater("The disk is full.")
    save.mark_failed(error)
    with pytest.warns(SaveWarning, match=r"out\.pt failed: The disk is full"):
        (export,) = wait([export_in_background(home, tmp_path / "out.pt", after=save, kind="torch")]).done
    assert export.exception() is error
    with pytest.raises(RetryLater, match="disk is full"):
        export.result()


@pytest.mark.parametrize(
    ("save", "mark", "match"),
    [(Save(1), Save.mark_skipped, "was skipped"), (Save(7), Save.mark_home, "to_home=True")],
)
def test_a_save_that_is_not_in_home_is_named_with_the_reason(
    home: Path, tmp_path: Path, save: Save, mark: Callable[[Save], None], match: str
) -> None:
    mark(save)
    with pytest.warns(SaveWarning, match=match):
        error = export_in_background(home, tmp_path / "out.pt", after=save).exception()
    assert isinstance(error, NotFound)


def test_damage_is_reported_and_nothing_is_written(home: Path, tmp_path: Path) -> None:
    flip(open_store(home), names.data(1, 1, 0), -5)
    with pytest.warns(SaveWarning, match=r"out\.safetensors failed"):
        error = export_in_background(home, tmp_path / "out.safetensors").exception()
    assert isinstance(error, Corrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_an_older_export_is_replaced_only_on_request(home: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"older")
    with pytest.warns(SaveWarning, match="overwrite=True"):
        error = export_in_background(home, tmp_path / "out").exception()
    assert isinstance(error, Conflict)
    assert (tmp_path / "out").read_bytes() == b"older"
    export_in_background(home, tmp_path / "out", step=1, overwrite=True).result()
    assert "model.weight" in load_file(tmp_path / "out")


@pytest.mark.parametrize(
    "options", [{"kind": "onnx"}, {"max_shard_bytes": "much"}, {"step": -1}, {"step": 1, "after": Save(1)}]
)
def test_invalid_arguments_are_refused_at_once(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        export_in_background(tmp_path / "home", tmp_path / "out", **options)  # pyright: ignore[reportArgumentType]


ENDS_EARLY = """
import sys, threading
from holdfast.checkpoint.exchange import export_in_background, exporter
began, stop = threading.Event(), exporter._stop_if_program_ends

def stop_late(num_bytes):
    began.set()
    exporter._program_ends.wait()
    stop(num_bytes)

exporter._stop_if_program_ends = stop_late
export_in_background(sys.argv[1], sys.argv[2])
began.wait()
"""


def test_a_program_that_ends_early_warns_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_EARLY, str(home), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "The program ended before the export to" in done.stderr
    assert "Call result()" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
