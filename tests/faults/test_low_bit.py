"""Trainings whose optimizer state is made of tensor subclasses end bit for bit alike, also after kill -9."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

from nursery import Nursery

TRAINER = Path(__file__).with_name("low_bit_trainer.py")
TOTAL = 11
has_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        "Momentum",
        pytest.param("AdamW8bit", marks=has_torchao),
        pytest.param("AdamW4bit", marks=has_torchao),
        pytest.param("AdamWFp8", marks=has_torchao),
    ],
)
def test_a_killed_training_ends_with_the_state_of_one_that_was_not(
    optimizer: str, nursery: Nursery, tmp_path: Path
) -> None:
    def run(home: str, *options: str) -> tuple[int, str]:
        arguments = [str(tmp_path / home), optimizer, str(TOTAL), str(tmp_path / f"{home}.final")]
        env = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
        child = nursery.start(
            ["-W", "ignore", str(TRAINER), *arguments, *options], tmp_path / "output", env=env
        )
        return child.wait(), child.said()

    status, said = run("whole")
    assert status == 0, said
    for step in (3, 6, 9):
        status, said = run("killed", "--die-at", str(step))
        assert status == -signal.SIGKILL, said
    status, said = run("killed")
    assert status == 0, said
    assert "restored step" in said
    assert (tmp_path / "killed.final").read_text() == (tmp_path / "whole.final").read_text()
