"""Engines of DeepSpeed that are attached to Holdfast: tags, stock folders, damage, refusals and copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")

import torch

import holdfast
from adapters.running import run_ranks
from holdfast.adapters.deepspeed.saved_files import stock_tag
from holdfast.checkpoint.stage.watch import Watcher
from holdfast.errors import Corrupt

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).parent / "scripts" / "scenarios.py")


def play_ranks(name: str, folder: Path, count: int, *args: int | str) -> list[dict[str, Any]]:
    """Play a scenario on ranks of one process group, and return the results by rank."""
    ended = run_ranks([SCRIPT, name, folder, *args], count, env={"DS_ACCELERATOR": "cpu"})
    assert [one.status for one in ended] == [0] * count, ended
    return [one.last() for one in ended]


def play(name: str, folder: Path, *args: int | str) -> dict[str, Any]:
    """Play a scenario in a process of its own, and return its result."""
    return play_ranks(name, folder, 1, *args)[0]


def test_each_tag_is_found_again_and_the_newest_latest_is_the_default(tmp_path: Path) -> None:
    found = play("tags", tmp_path)
    for tag, expected in {"None": "first", "best": "best", "side": "side", "same": "same"}.items():
        assert found[tag] == [expected, expected, True]
    assert "['same', 'side', 'first', 'best']" in found["missing"]
    assert holdfast.open(tmp_path / "holdfast").step == 5


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tuple", "first element is the engine"),
        ("every", "save_checkpoint()"),
        ("local", "Leave local= out"),
        ("client_state", "client_state=lambda"),
        *(
            (f"{live}{case}", "holdfast.adapters.deepspeed")
            for live in ("", "live ")
            for case in ("state", "optimizer", "nested")
        ),
        *(("module", "under ZeRO 3"), ("live module", "under ZeRO 3")),
        ("writer", "Remove"),
        ("twice", "already attached"),
        ("value", "mp_rank_00_model_states.pt"),
        ("options", "same options"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_the_fix(
    refusals: dict[str, Any], case: str, words: str
) -> None:
    assert words in refusals[case]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the messages of all refusals."""
    return play("refusals", tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "fp32")]
)
def test_objects_that_deepspeed_has_taken_over_are_refused(tmp_path: Path, stage: int, dtype: str) -> None:
    found = play("taken_over", tmp_path, stage, dtype)
    words = "under ZeRO 3" if stage == 3 else "overwrites in each step"
    assert words in found["model"]
    assert words in found["save of model"]
    for case in ("optimizer", "save of optimizer", "earlier"):
        assert "optimizer is an optimizer that was given to DeepSpeed" in found[case]
        assert "Call attach(engine, home)" in found[case]
    assert [found[case] for case in ("others", "save of others", "tensor", "save of tensor")] == [""] * 4


def test_objects_that_deepspeed_uses_as_they_are_are_not_refused(tmp_path: Path) -> None:
    assert set(play("taken_over", tmp_path, 0, "fp32").values()) == {""}


def test_a_run_that_was_not_loaded_is_not_continued(tmp_path: Path) -> None:
    play("export", tmp_path, 1)
    found = play("fresh", tmp_path)
    assert "has not loaded it" in found["refused"]
    assert found["steps"] == [2]


def test_the_newest_of_stock_and_own_checkpoints_is_loaded(tmp_path: Path) -> None:
    steps = {"path": "global_step3", "again": "global_step5", "old": "global_step3", "newest": "global_step9"}
    assert play("stock", tmp_path) == {**steps, "is_equal": True, "is_equal_again": True}


def test_an_older_checkpoint_is_loaded_if_the_newest_is_damaged(tmp_path: Path) -> None:
    found = play("damage", tmp_path)
    assert (found["path"], found["is_equal"]) == ("global_step2", True)
    assert "Corrupt" in found["explicit"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_is_loaded_without_the_state_of_its_optimizer(tmp_path: Path, stage: int) -> None:
    found = play("weights_only", tmp_path, stage)
    assert found == {"first": ["first", True], "second": ["second", True], "changed": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stock_deepspeed_and_its_scripts_read_an_export(tmp_path: Path, stage: int) -> None:
    found = play("export", tmp_path, stage)
    assert found == {"epoch": 7, "path": "global_step2", "is_equal": True}
    note = (tmp_path / "global_step2" / "HOLDFAST.txt").read_text()
    assert f"holdfast export {tmp_path / 'holdfast'} FOLDER --to deepspeed --step 2" in note
    if not stage:
        return
    run("deepspeed.utils.zero_to_fp32", tmp_path / "stock", tmp_path / "fp32")
    weights = torch.load(tmp_path / "fp32" / "pytorch_model.bin", weights_only=True)
    assert {name: tuple(one.shape) for name, one in weights.items()} == {
        **{"0.weight": (8, 8), "0.bias": (8,), "2.weight": (1, 8), "2.bias": (1,)}
    }
    source, target = tmp_path / "stock" / "global_step2", tmp_path / "universal"
    folders = "--input_folder", source, "--output_folder", target
    run("deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders)
    for name, one in weights.items():
        saved = torch.load(target / "zero" / name / "fp32.pt", weights_only=False)
        whole = saved["param"] if isinstance(saved, dict) else saved
        assert torch.equal(whole.view(one.shape), one)


def run(module: str, *args: Any) -> None:
    """Run a script of DeepSpeed."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, args)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["fifo", "folder", "bytes", "long", "nul"])
def test_a_strange_file_latest_is_refused(tmp_path: Path, kind: str) -> None:
    """Whether there is a checkpoint of DeepSpeed's own is not known, so training may not begin from zero."""
    path = tmp_path / "latest"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes({"bytes": b"\xff\xfe", "long": b"a" * 100_000, "nul": b"a\0b"}[kind])
    with pytest.raises(Corrupt, match="does not contain the tag of a checkpoint"):
        stock_tag(str(tmp_path), None)


@pytest.mark.ranks
@pytest.mark.skipif(Watcher().refusal is not None, reason="the kernel does not record writes")
@pytest.mark.parametrize(
    ("stage", "dtype", "count"),
    [
        *((0, "fp32", 1), (1, "fp32", 1), (3, "bf16", 1)),
        *((1, "bf16", 2), (2, "fp32", 2), (2, "bf16", 2), (3, "fp32", 2), (3, "bf16", 2)),
    ],
)
def test_an_optimizer_is_copied_while_batches_pass_and_its_step_waits(
    tmp_path: Path, stage: int, dtype: str, count: int
) -> None:
    for one in play_ranks("copies", tmp_path, count, stage, dtype):
        assert one["untouched"] == [True, True]
        # Scripts may write to the module's weights after a save: these were copied before it returned.
        assert one["exchanged"] == [True, True]
        # The optimizer's memory was written to, on one rank. No rank may lack the checkpoint unnoticed.
        is_held, loaded, words = one["repeated"]
        assert (is_held, loaded, len(words)) == (True, "equal", 1)
        assert "was saved in its place" in words[0]
        is_held, loaded, words = one["missing"]
        assert (is_held, loaded, len(words)) == (True, "NotFound", 1)
        assert "nothing was saved in its place" in words[0]
