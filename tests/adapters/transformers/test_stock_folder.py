from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs torch-holdfast[transformers]")
pytest.importorskip("accelerate", reason="needs torch-holdfast[transformers]")

from safetensors.torch import save_file

from adapters.damage import flip
from holdfast.adapters.transformers.folders import Folders, find_fault, list_folders, step_of, surplus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder as the Trainer writes it."""
    return make_folder(tmp_path / "checkpoint-7")


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    save_file({"w": torch.arange(100.0)}, path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.arange(100.0)}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step_of(path)}))
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_every_truncated_file_is_found(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for length in (0, 4, len(data) // 2, len(data) - 1):
        (folder / name).write_bytes(data[:length])
        assert name in str(find_fault(folder, world_size=1)), length


def test_a_flipped_bit_in_an_archive_is_found(folder: Path) -> None:
    data = (folder / "optimizer.pt").read_bytes()
    flip(folder / "optimizer.pt", data.index(torch.arange(100.0).numpy().tobytes()) + 10)
    assert "optimizer.pt" in str(find_fault(folder, world_size=1))


@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.pt", "scheduler.pt", "model.safetensors"])
def test_every_missing_file_is_a_fault(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert find_fault(folder, world_size=1) is not None
    (folder / "trainer_state.json").write_text('{"global_step": 6}')
    assert find_fault(folder, world_size=1) == "trainer_state.json is of step 6"


def test_all_ranks_must_have_saved_their_generators(folder: Path) -> None:
    assert find_fault(folder, world_size=1) is None
    assert find_fault(folder, world_size=2) is None  # saved by one rank, resumed by two
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    assert find_fault(folder, world_size=2) == "rng_state_1.pth is missing"
    torch.save({}, folder / "rng_state_1.pth")
    assert find_fault(folder, world_size=2) is None


def test_weights_alone_are_enough_where_only_the_model_is_saved(folder: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    assert find_fault(folder, world_size=1) == "it has no optimizer"
    assert find_fault(folder, world_size=1, with_training=False) is None


def test_a_missing_shard_is_found(folder: Path) -> None:
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_fault(folder, world_size=1) == "model-00002-of-00002.safetensors is missing"


def test_folders_are_listed_by_step(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-best", "holdfast"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [step for step, _ in list_folders(tmp_path)] == [9, 10]


def test_only_folders_of_interrupted_saves_and_deletions_are_removed(tmp_path: Path) -> None:
    folders = Folders(str(tmp_path), "home", writes=True)
    for step in (2, 4, 8, 12, 16):
        folders.make(step, "{}", None)
    folders.make(3, "{}", None, home="another")
    (tmp_path / "checkpoint-12" / "mine.txt").write_text("a callback's")
    folders.remove_interrupted(after=4, complete=[16])
    assert folders.steps() == [3, 4, 12, 16]


@pytest.mark.parametrize(
    ("steps", "limit", "best", "deleted"),
    [
        ([5, 10, 15], 2, None, [5]),
        ([5, 10, 15], 1, None, [5, 10]),
        ([5, 10, 15], 1, 5, [10]),  # the newest and the best one are left
        ([5, 10, 15], 2, 5, [10]),
        ([5, 10, 15], 3, 5, []),
        ([5, 10, 15], None, None, []),
        ([5, 10, 15], 0, None, []),
        ([15, 5], 1, None, [15]),  # saved in this order, after going back
        ([5, 10, 15], 1, 99, [5, 10]),  # the best one does not exist any more
    ],
)
def test_a_limit_leaves_the_newest_and_the_best(
    steps: list[int], limit: int | None, best: int | None, deleted: list[int]
) -> None:
    assert surplus(steps, limit=limit, best=best) == deleted
