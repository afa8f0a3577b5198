"""Saves of DeepSpeed's engines that are copied beside the next forward and backward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")

from adapters.running import run_ranks
from holdfast.checkpoint.stage.watch import Watcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.skipif(Watcher().refusal is not None, reason="the kernel does not record writes"),
]
SCRIPT = Path(__file__).parent / "scripts" / "copies.py"


def play(folder: Path, count: int, **plan: Any) -> list[dict[str, Any]]:
    """Save on ranks of one process group, and return the results by rank."""
    ended = run_ranks([SCRIPT, folder, json.dumps(plan)], count, env={"DS_ACCELERATOR": "cpu"})
    assert [one.status for one in ended] == [0] * count, ended
    return [one.last() for one in ended]


@pytest.mark.parametrize(
    ("stage", "dtype", "count"),
    [
        (0, "fp32", 1),
        (1, "fp32", 1),
        (3, "bf16", 1),
        (1, "bf16", 2),
        (2, "fp32", 2),
        (2, "bf16", 2),
        (3, "fp32", 2),
        (3, "bf16", 2),
    ],
)
def test_an_optimizer_is_copied_while_batches_pass_and_its_step_waits(
    tmp_path: Path, stage: int, dtype: str, count: int
) -> None:
    for one in play(tmp_path, count, stage=stage, dtype=dtype):
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
