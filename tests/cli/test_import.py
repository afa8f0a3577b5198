"""`holdfast import`: homes from checkpoints of other libraries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import holdfast as package
from cli.conftest import Command, run_on_terminal, runs_without_torch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a file with torch.save."""
    torch.save({"model": {"w": torch.ones(3, 2)}, "epoch": 4}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_a_file_becomes_a_home(holdfast: Command, source: Path, tmp_path: Path) -> None:
    result = holdfast("import", source, tmp_path / "run", "--step", 30)
    assert result.status == 0
    assert result.out.startswith(f"step 30 of {tmp_path / 'run'}: 1 tensor, ")
    assert "(torch)" in result.out
    assert "complete, newest" in holdfast("ls", tmp_path / "run").out
    assert holdfast("verify", tmp_path / "run").status == 0
    assert "imported from" in holdfast("history", tmp_path / "run").out
    assert package.open(tmp_path / "run").values()["epoch"] == 4
    holdfast("import", source, tmp_path / "run").refused("already")


def test_json_describes_the_import(holdfast: Command, source: Path, tmp_path: Path) -> None:
    words = ("--json", "--from", "torch", "--only", "model", "--under", "old")
    done = holdfast("import", source, tmp_path / "run", *words).json
    assert done["seconds"] > 0
    assert done["num_bytes"] > 24
    facts = {"home": str(tmp_path / "run"), "step": 0, "kind": "torch", "num_tensors": 1}
    assert {key: done[key] for key in facts} == facts
    assert package.open(tmp_path / "run").keys() == ["old.model.w"]


def test_errors_are_status_2_and_damage_is_status_1(holdfast: Command, source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    holdfast("import", tmp_path / "notes.txt", tmp_path / "run").refused("Supported are")
    assert holdfast("import", tmp_path / "gone", tmp_path / "run").status == 2
    os.truncate(source, 200)
    assert holdfast("import", source, tmp_path / "run").status == 1
    assert not (tmp_path / "run").exists()


def test_a_safetensors_file_needs_no_torch(holdfast: Command, source: Path, tmp_path: Path) -> None:
    holdfast("import", source, tmp_path / "first")
    holdfast("export", tmp_path / "first", tmp_path / "a.safetensors")
    runs_without_torch("import", tmp_path / "a.safetensors", tmp_path / "run")
    assert package.open(tmp_path / "run").keys() == ["model.w"]


def test_a_terminal_shows_a_progress_bar(source: Path, tmp_path: Path) -> None:
    """The bar is drawn on stderr. stdout has only the result."""
    out, drawn = run_on_terminal("import", source, tmp_path / "run")
    assert len(out.splitlines()) == 1
    assert b"\x1b[" in drawn
