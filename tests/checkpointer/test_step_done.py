"""Loops of one's own: one call per step counts, saves when due and ends a preempted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.watch.preemption.sources import Notice, write_notice
from stage.training import make_checkpointer


def test_each_call_counts_one_step_and_saves_those_that_are_due(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state, every=2, keep=None) as ckpt:
        assert ckpt.restore() is None
        counts = []
        for _ in range(5):
            state["x"] += 1
            counts.append(ckpt.step_done())
        ckpt.finish()
        assert counts == [1, 2, 3, 4, 5]
        assert ckpt.all_steps() == [2, 4, 5]
        assert ckpt.latest_step() == 5
    assert holdfast.open(home, step=4)["x"].item() == 4


def test_the_count_continues_from_the_restored_step(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state, every=4, keep=None) as ckpt:
        ckpt.restore()
        for _ in range(6):
            state["x"] += 1
            ckpt.step_done()
        ckpt.wait()
    with make_checkpointer(home, state, every=4, keep=None) as ckpt:
        assert ckpt.restore() == 6  # leaving the block saved the end
        assert ckpt.step_done() == 7
        assert ckpt.restore(step=4) == 4
        assert ckpt.step_done() == 5


def test_a_notice_saves_the_step_and_ends_the_run(home: Path, tmp_path: Path) -> None:
    notice, state = tmp_path / "notice", {"x": torch.zeros(1)}
    preemption = holdfast.Preemption(f"file:{notice}", signals=False)
    with make_checkpointer(home, state, every=1000, watches=[preemption]) as ckpt:
        ckpt.restore()
        assert [ckpt.step_done(), ckpt.step_done()] == [1, 2]
        write_notice(notice, Notice("holdfast preempt"))
        with pytest.raises(holdfast.Preempted) as preempted:
            ckpt.step_done()
    assert preempted.value.step == 3
    assert holdfast.open(home).step == 3
