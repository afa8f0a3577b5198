"""`holdfast export` in all formats, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.conftest import Command, flip
from holdfast.checkpoint.format import names


def test_safetensors_is_the_default(holdfast: Command, home: Path, tmp_path: Path) -> None:
    result = holdfast("export", home, tmp_path / "a.safetensors", "--only", "model", "--rename", "model=")
    assert result.status == 0
    assert result.out.startswith(f"{tmp_path / 'a.safetensors'}: 3 tensors, ")
    found = load_file(tmp_path / "a.safetensors")
    assert set(found) == {"weight", "bias[0]", "head"}
    assert torch.equal(found["weight"], torch.full((30, 4), 302.0))
    assert torch.equal(found["head"], found["weight"])


def test_step_attempt_and_rank_are_chosen(holdfast: Command, home: Path, tmp_path: Path) -> None:
    words = ("--to", "torch", "--step", 300, "--attempt", 1, "--rank", 1)
    done = holdfast("export", home, tmp_path / "a.pt", *words, "--json").json
    assert (done["step"], done["kind"], done["num_tensors"]) == (300, "torch", 4)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(found["model.weight"], torch.full((30, 4), 301.0))
    assert found["rng.torch"].eq(2).all()
    assert found["seed"] == 1
    assert found["optimizer"] == {"groups": [{"lr": 0.5, "betas": (0.9, 0.95)}]}


def test_a_hugging_face_folder_has_an_index_and_keeps_other_files(
    holdfast: Command, home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    words = ("export", home, folder, "--to", "hf", "--only", "model")
    assert holdfast(*words, "--max-shard", "500B").status == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"model.weight", "model.bias[0]", "model.head"}
    assert index["metadata"]["total_size"] == 2 * 480 + 40
    holdfast(*words).refused("--overwrite")
    assert holdfast(*words, "--overwrite").status == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize("kind", ["safetensors", "hf", "torch", "dcp"])
def test_damage_is_status_1_and_leaves_no_file(
    holdfast: Command, home: Path, tmp_path: Path, kind: str
) -> None:
    flip(home / names.data(300, 2, 0), at=4096)
    holdfast("export", home, tmp_path / "out", "--to", kind).refused("model.weight", status=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("kind", ["safetensors", "hf", "torch", "dcp"])
def test_an_existing_file_is_replaced_only_with_overwrite(
    holdfast: Command, home: Path, tmp_path: Path, kind: str
) -> None:
    def contents() -> dict[Path, bytes]:
        places = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
        return {path: path.read_bytes() for path in places if path.is_file()}

    assert holdfast("export", home, tmp_path / "out", "--to", kind, "--step", 100).status == 0
    before = contents()
    holdfast("export", home, tmp_path / "out", "--to", kind).refused("exists")
    assert contents() == before
    assert holdfast("export", home, tmp_path / "out", "--to", kind, "--overwrite").status == 0
    assert contents() != before


def test_a_rename_without_a_new_name_is_refused(holdfast: Command, home: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        holdfast("export", home, tmp_path / "out", "--rename", "model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("suffix", ["pt", "pth", "ckpt", "bin"])
def test_the_suffix_chooses_the_format(holdfast: Command, home: Path, tmp_path: Path, suffix: str) -> None:
    assert holdfast("export", home, tmp_path / f"step-100.{suffix}", "--step", 100).status == 0
    result = holdfast("export", home, tmp_path / f"a.{suffix}")
    assert result.status == 0
    assert result.err == "holdfast: exporting step 300, the newest\n"
    assert "model.weight" in torch.load(tmp_path / f"a.{suffix}", weights_only=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("out.weird",), "does not choose a format"),
        (("out",), "does not choose a format"),
        (("out.pt", "--to", "safetensors"), "stands for the format torch"),
        (("out.safetensors", "--to", "torch"), "stands for the format safetensors"),
        (("out.pt", "--to", "dcp"), "stands for the format torch"),
        (("checkpoint-20", "--to", "torch"), "names step 20, but the checkpoint is of step 300"),
        (("my-step-00000100.pt",), "names step 100, but the checkpoint is of step 300"),
        (("nowhere/out.pt",), "make the folder first"),
        (("out", "--to", "safetensors", "--only", "modle"), "modle"),
        (("out", "--to", "safetensors", "--rename", "model.weight=model.head"), "model.head"),
        (("out", "--to", "torch", "--rename", "model=x"), "top-level"),
        (("out", "--to", "safetensors", "--step", 7), "7"),
        (("out", "--to", "safetensors", "--rank", 9), "rank 9 does not exist"),
        (("out", "--to", "safetensors", "--max-shard", "big"), "--max-shard"),
    ],
)
def test_invalid_options_and_a_name_that_contradicts_the_content_are_refused(
    holdfast: Command, home: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    holdfast("export", home, tmp_path / words[0], *words[1:]).refused(message)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_home_that_does_not_exist_is_refused_with_the_nearest_name(
    holdfast: Command, home: Path, tmp_path: Path
) -> None:
    for words in (("export", tmp_path / "rum", tmp_path / "a.pt"), ("ls", tmp_path / "rum")):
        assert f"Did you mean {home}?" in holdfast(*words).err
