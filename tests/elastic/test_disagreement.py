"""Ranks that disagree are named soon, nothing hangs, and training continues."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from elastic.conftest import Worlds
from elastic.trips import checkpointer
from holdfast.checkpoint.format import names
from layouts import mesh_of
from stage.training import wait_until

pytestmark = pytest.mark.ranks

SOON_S = 300  # below the commit timeout, which is ten minutes


def sound_state() -> dict[str, Any]:
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    fully_shard(model[0], mesh=mesh_of(2))
    return {"model": model, "table": holdfast.replicated(torch.ones(4)), "other": nn.Linear(2, 2)}


def spoil(state: dict[str, Any], how: str) -> str:
    """Change a state; answers the tensor that is to be named."""
    if how == "key":
        del state["table"]
        return "table"
    if how == "layer":
        state["other"] = nn.Module()
        return "other."
    if how == "shape":
        state["table"] = holdfast.replicated(torch.ones(5))
        return "table"
    if how == "dtype":
        state["other"] = nn.Linear(2, 2).bfloat16()
        return "other."
    assert how == "kind"
    state["table"] = holdfast.per_rank(torch.ones(4))
    return "table"


def check_named(text: str, how: str) -> None:
    """Check that an error names the tensor and the rank that `spoil` has changed."""
    assert spoil(dict.fromkeys(("model", "table", "other")), how) in text
    assert "rank 1" in text.lower()


def disagree_later(rank: int, home: Path, how: str) -> tuple[str, int]:
    """Save well, then with another structure on rank 1, then well again."""
    state = sound_state()
    sound = dict(state)
    with warnings.catch_warnings(record=True), checkpointer(home, state) as ckpt:
        ckpt.save(1).wait_durable(SOON_S)
        if rank == 1:
            spoil(state, how)
        save = ckpt.save(2)
        with pytest.raises(holdfast.InvalidInput) as refused:
            save.wait_durable(SOON_S)
        state.clear()
        state.update(sound)
        ckpt.save(3).wait_durable(SOON_S)
        return str(refused.value), ckpt.latest_step() or 0


@pytest.mark.parametrize("how", ["key", "layer", "shape", "dtype", "kind"])
def test_a_rank_that_changes_its_structure_is_named_and_later_saves_succeed(
    worlds: Worlds, tmp_path: Path, how: str
) -> None:
    home = tmp_path / "home"
    for text, latest in worlds(2).run(disagree_later, home, how):
        assert text.startswith("Step 2 was not committed: ")
        check_named(text, how)
        assert latest == 3
    assert [one for one in (1, 2, 3) if _is_good(home, one)] == [1, 3]


def _is_good(home: Path, step: int) -> bool:
    try:
        return not holdfast.open(home, step=step).verify().problems
    except holdfast.NotFound:
        return False


def disagree_first(rank: int, home: Path, how: str) -> tuple[str, int]:
    """Begin with another structure on rank 1, be refused, mend it, and save."""
    state = sound_state()
    sound = dict(state)
    if rank == 1:
        spoil(state, how)
    with checkpointer(home, state) as ckpt:
        with pytest.raises(holdfast.InvalidInput) as refused:
            ckpt.save(1)
        state.clear()
        state.update(sound)
        ckpt.save(2).wait_durable(SOON_S)
        return str(refused.value), ckpt.latest_step() or 0


@pytest.mark.parametrize("how", ["shape", "dtype"])
def test_ranks_that_disagree_at_the_first_save_are_refused_before_anything_is_written(
    worlds: Worlds, tmp_path: Path, how: str
) -> None:
    for text, latest in worlds(2).run(disagree_first, tmp_path / "home", how):
        check_named(text, how)
        assert "rank 0" in text
        assert latest == 2


def stop_a_keeper(rank: int, home: Path) -> tuple[str, int]:
    """Save while rank 1's keeper is stopped, and again when it continues."""
    state, limits = sound_state(), holdfast.Limits(commit_timeout=1 if rank == 0 else 15)
    with warnings.catch_warnings(record=True), checkpointer(home, state, limits=limits) as ckpt:
        keeper = psutil.Process(ckpt._training.attempt.begin().pid)
        save_rank_0_last(rank, ckpt, home, 1)
        if rank == 1:
            keeper.send_signal(signal.SIGSTOP)
        save = ckpt.save(2)
        told = ""
        if rank == 0:
            with pytest.raises(holdfast.RetryLater) as missed:
                save.wait_durable(SOON_S)
            told = str(missed.value)
        torch.distributed.barrier()
        if rank == 1:
            keeper.send_signal(signal.SIGCONT)
            with pytest.raises(holdfast.RetryLater) as missed:
                save.wait_durable(SOON_S)
            told = str(missed.value)
        torch.distributed.barrier()
        save_rank_0_last(rank, ckpt, home, 3)
        return told, ckpt.latest_step() or 0


def save_rank_0_last(rank: int, ckpt: holdfast.Checkpointer, home: Path, step: int) -> None:
    """Save on rank 0, which hardly waits for the other, when rank 1's part is there."""
    if rank == 1:
        ckpt.save(step)
        wait_until((home / names.part(step, 1, 1)).exists)
    torch.distributed.barrier()
    ckpt.save(step).wait_durable(SOON_S)


@pytest.mark.slow
def test_a_rank_whose_keeper_hangs_is_named_after_the_timeout(worlds: Worlds, tmp_path: Path) -> None:
    home = tmp_path / "home"
    told = worlds(2).run(stop_a_keeper, home)
    assert "Step 2 was not committed: the parts of ranks [1] did not arrive" in told[0][0]
    assert "Step 2 was not committed" in told[1][0]
    assert [latest for _, latest in told] == [3, 3]
    assert [one for one in (1, 2, 3) if _is_good(home, one)] == [1, 3]
