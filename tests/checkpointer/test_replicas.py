"""Drifting replicas in real runs: named at the next save, and nobody is accused in a healthy run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from checkpointer import drifting
from checkpointer.drifting import KINDS, Flip
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sections import Health
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store import open_store
from holdfast.cli import main
from stage.ranks import run_ranks

slow = pytest.mark.slow
TENSORS = {
    "weight": "net.back.weight",
    "buffer": "net.table",
    "moment": "optimizer.state.net.back.weight.exp_avg",
}


def health(home: Path, step: int) -> Health:
    return read_manifest(open_store(home), CheckpointId(attempt=1, step=step), None).health


def differences(home: Path) -> list[dict[str, Any]]:
    lines, _ = read_lines(open_store(home))
    return [line for line in lines if line["event"] == "replicas-differ"]


def check_named(home: Path, found: list[list[str]], flip: Flip, tensor: str, *, others: list[int]) -> None:
    """The manifest, the history and a warning of the run name tensor, rank, host and step."""
    first, *_ = differences(home)
    named = first["difference"]
    assert first["step"] == flip.step
    assert named["tensors"] == [tensor]
    assert flip.rank in named["ranks"]
    assert named["others"] == others
    assert all(named["hosts"])
    assert health(home, flip.step).healthy is False
    assert tensor in health(home, flip.step).reasons[0]
    assert any(f"checkpoint of step {flip.step}" in text and tensor in text for text in found[0])
    assert all(health(home, step).healthy is not False for step in range(2, flip.step, 2))


def check_clean(home: Path, found: list[list[str]], *, num_steps: int) -> None:
    assert found == [[] for _ in found]
    assert differences(home) == []
    for step in range(2, num_steps + 1, 2):
        assert health(home, step).healthy is not False
        assert any("equal on all ranks" in reason for reason in health(home, step).reasons)


@pytest.mark.essential
def test_a_flipped_bit_of_one_of_three_ranks_is_named_at_the_next_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip = Flip(1)
    found = run_ranks(3, drifting.train, tmp_path, "plain", flip)
    check_named(tmp_path, found, flip, "net.back.weight", others=[0, 2])
    assert main(["ls", str(tmp_path)]) == 0
    assert re.search(r"step 16, .*at step 6 rank 1 \(\S+\) has other bytes than", capsys.readouterr().out)
    assert main(["history", str(tmp_path)]) == 0
    assert "replicas-differ" in capsys.readouterr().out


def test_two_ranks_have_no_majority_but_for_a_constant(tmp_path: Path) -> None:
    found = run_ranks(2, drifting.train, tmp_path / "moment", "plain", Flip(1, "moment"))
    check_named(tmp_path / "moment", found, Flip(1), TENSORS["moment"], others=[])
    assert "ranks 0 (" in found[0][0]
    found = run_ranks(2, drifting.train, tmp_path / "buffer", "plain", Flip(1, "buffer"))
    check_named(tmp_path / "buffer", found, Flip(1), TENSORS["buffer"], others=[0])


@pytest.mark.fsdp2_on_cpu
@pytest.mark.parametrize(
    ("flip", "tensor"),
    [
        (Flip(3), "net.0.weight"),
        pytest.param(Flip(0), "net.0.weight", marks=slow),
        pytest.param(Flip(2, "moment"), "optimizer.state.net.0.weight.exp_avg", marks=slow),
    ],
)
def test_a_replica_of_a_shard_is_compared_in_hsdp(tmp_path: Path, flip: Flip, tensor: str) -> None:
    found = run_ranks(4, drifting.train_hsdp, tmp_path, flip)
    check_named(tmp_path, found, flip, tensor, others=[])
    assert differences(tmp_path)[0]["difference"]["ranks"] == [flip.rank % 2, flip.rank % 2 + 2]


@slow
@pytest.mark.fsdp2_on_cpu
def test_no_clean_run_of_hsdp_is_accused(tmp_path: Path) -> None:
    check_clean(tmp_path, run_ranks(4, drifting.train_hsdp, tmp_path, None), num_steps=12)


@slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("what", ["weight", "moment", "buffer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_flip_is_named(tmp_path: Path, world_size: int, what: str, rank: int) -> None:
    """DDP sends a flipped buffer of rank 0 to the others with the next step, after the save."""
    flip = Flip(rank, what)
    found = run_ranks(world_size, drifting.train, tmp_path, "plain", flip)
    others = [one for one in range(world_size) if one != rank]
    if what != "buffer" and world_size == 2:
        others = []
    check_named(tmp_path, found, flip, TENSORS[what], others=others)


@slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_clean_run_is_accused(tmp_path: Path, kind: str, world_size: int) -> None:
    found = run_ranks(world_size, drifting.train, tmp_path, kind, None, 40)
    check_clean(tmp_path, found, num_steps=40)
