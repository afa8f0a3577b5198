"""Deletion of checkpoints that a trainer does not want any more: soon, in all tiers, and never the newest."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
import nursery
from holdfast import Home, Local
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import InvalidInput
from making import kept
from stage.ranks import run_ranks
from stage.training import make_checkpointer, wait_until

make = functools.partial(make_checkpointer, state=None, keep=None, memory="64MiB")


def save(ckpt: holdfast.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(step, {"w": torch.full((100,), float(step))})


def test_older_checkpoints_are_deleted(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        ckpt.wait()
        ckpt.delete(1)
        ckpt.delete(3)
        ckpt.delete(30)  # it does not exist
        wait_until(lambda: kept(tmp_path) == [(1, 2), (1, 4)])
    assert holdfast.open(tmp_path, step=2).verify().is_good


def test_the_newest_is_deleted_only_when_another_has_replaced_it(tmp_path: Path) -> None:
    """Even if the process ends: then it is the one to resume from."""
    with make(tmp_path) as ckpt:
        save(ckpt, 1)
        ckpt.delete(1)
        ckpt.wait()
    assert kept(tmp_path) == [(1, 1)]
    with make(tmp_path) as ckpt:
        ckpt.load()
        ckpt.delete(1)  # before this process has claimed the home
        assert kept(tmp_path) == [(1, 1)]
        save(ckpt, 2)
    assert kept(tmp_path) == [(2, 2)]


def test_all_attempts_of_a_step_are_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        with make(tmp_path) as ckpt:
            ckpt.load(1) if kept(tmp_path) else None
            save(ckpt, *([] if kept(tmp_path) else [1]), 2)
            ckpt.wait()
    assert kept(tmp_path) == [(1, 1), (1, 2), (2, 2)]
    with make(tmp_path) as ckpt:
        ckpt.continue_from()
        ckpt.delete(2)
        save(ckpt, 3)
    assert kept(tmp_path) == [(1, 1), (3, 3)]


def test_a_step_that_is_deleted_before_it_is_complete_goes_later(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        for step in range(1, 10):
            save(ckpt, step)
            ckpt.delete(step)
        save(ckpt, 10)
    assert kept(tmp_path) == [(1, 10)]


def test_with_a_local_folder_it_is_deleted_in_both(tmp_path: Path) -> None:
    home, local = tmp_path / "home", tmp_path / "local"
    with make(Home(home, every=1), local=Local(local, keep=10)) as ckpt:
        save(ckpt, 1, 2, 3)
        ckpt.wait()
        ckpt.delete(1)
        ckpt.delete(2)
        wait_until(lambda: kept(local) == [(1, 3)])
    assert kept(home) == [(1, 3)]


def test_a_new_keeper_deletes_what_the_killed_one_had_received(tmp_path: Path) -> None:
    script = f"""
import os, signal, torch, holdfast
ckpt = holdfast.Checkpointer({str(tmp_path)!r}, keep=None, watches=[holdfast.Preemption(signals=False)])
for step in (1, 2):
    ckpt.save(step, {{"w": torch.ones(10)}})
ckpt.delete(2)
ckpt.wait()
os.kill(ckpt._training.attempt.keeper.pid, signal.SIGKILL)
ckpt.save(3, {{"w": torch.ones(10)}})
ckpt.wait()
ckpt.close()
"""
    assert nursery.shared().run(["-c", script]).returncode == 0
    assert kept(tmp_path) == [(1, 1), (1, 3)]


def test_a_kill_after_the_deletion_leaves_a_checkpoint(tmp_path: Path) -> None:
    """A trainer replaces its only checkpoint, and is killed at once: one of the two is there."""
    script = f"""
import os, signal, torch, holdfast
ckpt = holdfast.Checkpointer({str(tmp_path)!r}, keep=None, watches=[holdfast.Preemption(signals=False)])
step = (ckpt.continue_from() or 0) + 1
ckpt.save(step, {{"w": torch.full((1000,), float(step))}})
ckpt.delete(step - 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    for _ in range(4):
        assert nursery.shared().run(["-c", script]).returncode == -signal.SIGKILL
    with make(tmp_path) as ckpt:
        loaded = ckpt.load()
        assert loaded is not None
        assert loaded["w"][0] == ckpt.restored_step


def test_a_step_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt, pytest.raises(InvalidInput):
        ckpt.delete("epoch=1")  # pyright: ignore[reportArgumentType] - the test is about that


def delete_on_rank(rank: int, folder: Path) -> list[Any]:
    local = folder / f"local-{rank}"  # as on two hosts
    with make(Home(folder / "home", every=1), local=Local(local, keep=10)) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            ckpt.wait()
        ckpt.delete(2)
        save(ckpt, 4)
        ckpt.wait()
    return [kept(folder / "home")]


def test_every_rank_deletes_in_its_own_folder(tmp_path: Path) -> None:
    assert run_ranks(2, delete_on_rank, tmp_path) == [[[(1, 1), (1, 3), (1, 4)]]] * 2
    for rank in range(2):
        assert not list((tmp_path / f"local-{rank}" / "step-00000002").glob("*"))
        assert list((tmp_path / f"local-{rank}" / "step-00000003").glob("*"))


@given(st.lists(st.tuples(st.sampled_from(["add", "commit"]), st.integers(0, 6)), max_size=30))
def test_in_any_order_just_the_unwanted_older_ones_are_found(orders: list[tuple[str, int]]) -> None:
    """Against a model: a step goes if it was added, and something newer is complete."""
    store, saved, added, newest = MemoryStore(), set[int](), set[int](), -1
    retention = Retention(store, Keep(None))
    for order, step in orders:
        if order == "add":
            retention.unwanted.add(step)
            added.add(step)
        elif step > newest:
            newest = step
            saved.add(step)
            store.put(names.manifest(step, 1), b"")
            found = [one.step for one in retention.apply(CheckpointId(1, newest), (), ())]
            assert found == sorted(one for one in saved if one in added and one < newest)
            saved -= set(found)
            added -= {one for one in added if one < newest}
