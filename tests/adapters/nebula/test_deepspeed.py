"""DeepSpeed trains with its "nebula" block, is killed, and resumes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import holdfast
from adapters.nebula.running import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed",
    ),
]


def lines_of(ranks: list[list[str]], word: str) -> list[str]:
    """Return the line of each rank that begins with a word, without DeepSpeed's own lines."""
    return [next(line for line in lines if line.startswith(word)) for lines in ranks]


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_killed_run_resumes_bit_for_bit(
    home: str, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_STAGE", stage)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    whole = run_ranks(2, home + "-whole", tmp_path / "whole", 4, 0, script="zero")
    run_ranks(2, home, tmp_path / "ds", 4, 2, script="zero", dies=True)
    resumed = run_ranks(2, home, tmp_path / "ds", 4, 0, script="zero")
    assert lines_of(resumed, "start") == ["start 2"] * 2
    assert lines_of(resumed, "weights") == lines_of(whole, "weights")
    checkpoint = holdfast.open(home)
    assert checkpoint.world_size == 2
    assert checkpoint.verify().is_good
    assert torch.load(tmp_path / "ds" / "pytorch_model.bin", weights_only=True)
