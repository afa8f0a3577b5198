"""`holdfast tune`: output as text and JSON, and errors."""

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


def test_a_script_runs_with_its_arguments_and_the_report_is_json(tmp_path: Path, holdfast: Command) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = holdfast("tune", "--only", "input", "--steps", "4", "--json", script, "--json", "3")
    assert done.status == 0
    assert done.json["findings"] == []
    assert done.json["steps"]["device"] == "cpu"
    assert done.json["steps"]["call"]["code"] == "loss = model(torch.randn(4, 8)).square().mean()"
    assert "plain steps" in done.err


@pytest.mark.slow
def test_the_text_has_the_line_and_the_suggestion(tmp_path: Path, holdfast: Command) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = holdfast("tune", "--only", "syncs", "--steps", "4", script, "--json", "3")
    assert "train.py:12" in done.out
    assert "step % 50" in done.out


def test_an_unknown_question_and_a_missing_script_are_rejected(holdfast: Command) -> None:
    holdfast("tune", "--only", "luck", "train.py").refused("'luck'")
    holdfast("tune", "nowhere.py").refused("does not exist")
