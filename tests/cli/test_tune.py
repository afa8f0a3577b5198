"""`holdfast tune`: what it says, in words and as JSON, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Command

SCRIPT = """
import sys
import torch

assert sys.argv[1:] == ["--json", "3"]
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()
"""


def test_a_script_is_run_with_its_arguments_and_told_as_json(tmp_path: Path, holdfast: Command) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = holdfast("tune", "--only", "input", "--steps", "4", "--json", script, "--json", "3")
    assert said.status == 0
    assert said.json["findings"] == []
    assert said.json["steps"]["optimizer"] == "SGD"
    assert said.json["steps"]["call"]["code"] == "loss = model(torch.randn(4, 8)).square().mean()"
    assert "plain steps" in said.err


@pytest.mark.slow
def test_words_name_the_line_and_the_change(tmp_path: Path, holdfast: Command) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = holdfast("tune", "--only", "syncs", "--steps", "4", script, "--json", "3")
    assert "train.py:12" in said.out
    assert "step % 50" in said.out


def test_an_unknown_question_is_refused(tmp_path: Path, holdfast: Command) -> None:
    said = holdfast("tune", "--only", "luck", tmp_path / "train.py")
    assert said.status == 2
    assert "'luck'" in said.err


def test_a_missing_script_is_refused(holdfast: Command) -> None:
    said = holdfast("tune", "nowhere.py")
    assert said.status == 2
    assert "no script" in said.err
