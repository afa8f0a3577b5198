"""A deleted home is gone: nothing of its run makes it anew, and nothing of it blocks the next run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import holdfast
from holdfast.checkpoint.format import run as runs
from holdfast.checkpoint.home.claim import check_claim, claim_attempt, claim_run
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.lockfile import running_keepers
from holdfast.checkpoint.keeper.worker import wait_for_run
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict
from nursery import shared
from stage.training import make_checkpointer, wait_until

KILLED = """
import os, sys, torch, holdfast
ckpt = holdfast.Checkpointer(sys.argv[1], {"w": torch.full((100_000,), 1.0)}, quiet=True)
ckpt.restore()
ckpt.save(3).wait_durable()
os.kill(os.getpid(), 9)
"""


def test_a_home_that_is_deleted_after_a_kill_begins_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    done = shared().run(["-c", KILLED, str(home)], env=os.environ | {"HOLDFAST_KEEP_IN_MEMORY": "1m"})
    assert done.returncode == -9, done.stderr
    wait_until(lambda: any(info.held for _, info in running_keepers(str(home))))
    shutil.rmtree(home)
    state = {"w": torch.zeros(100_000)}
    with make_checkpointer(home, state) as ckpt:
        assert ckpt.restore() is None
        ckpt.save(1)
    assert holdfast.open(home).step == 1
    assert capfd.readouterr().err.count("has a copy of another run") == 1


def test_an_attempt_does_not_claim_a_deleted_home_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "home")
    claim = claim_attempt(store, claim_run(store), world_size=1)
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(Conflict, match="was deleted while run"):
        check_claim(LocalStore(tmp_path / "home"), claim.number, runs.document(claim).decode())
    assert not (tmp_path / "home").exists()


def test_an_attempt_does_not_claim_a_home_of_another_run() -> None:
    store = MemoryStore()
    claim = claim_attempt(store, claim_run(store), world_size=1)
    for entry in list(store.list()):
        store.delete(entry.name)
    claim_run(store)
    with pytest.raises(Conflict, match="it holds another run now"):
        check_claim(store, claim.number, runs.document(claim).decode())


@pytest.mark.parametrize("has_successor", [False, True])
def test_a_keeper_that_starts_after_its_home_was_deleted_writes_nothing(
    tmp_path: Path, has_successor: bool
) -> None:
    home = tmp_path / "home"
    run = claim_run(LocalStore(home))
    shutil.rmtree(home)
    if has_successor:
        claim_run(LocalStore(home))
    before = sorted(home.rglob("*"))
    dead = cast(TrainerInbox, SimpleNamespace(trainer_gone=True, set_delay=lambda _: None))
    with pytest.raises(Conflict, match="was deleted since run"):
        wait_for_run(LocalStore(home), run, dead)
    assert sorted(home.rglob("*")) == before


def test_the_same_cell_of_a_notebook_runs_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed keeper of an interrupted cell offers its memory for minutes; the next cell takes it over."""
    monkeypatch.setenv("HOLDFAST_KEEP_IN_MEMORY", "10m")
    state: dict[str, Any] = {"w": torch.ones(1000)}

    def run_cell() -> None:
        with make_checkpointer(tmp_path / "home", state) as ckpt:
            for step in ckpt.steps(10):
                if step == 2:
                    ckpt.save(2).wait_durable()
                    pids.append(ckpt._training.attempt.keeper.pid)  # type: ignore[union-attr]
                    raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run_cell()
    wait_until(lambda: any(info.held for _, info in running_keepers(str(tmp_path / "home"))))
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        assert next(iter(ckpt.steps(10))) == 2
    assert pids
