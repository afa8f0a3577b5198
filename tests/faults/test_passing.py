"""A passing error does not cost a checkpoint, neither at the restore nor afterwards by retention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.cli import main
from holdfast.errors import RetryLater


def make_state(value: float) -> dict[str, object]:
    model = nn.Linear(32, 32)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model}


def train(home: Path, steps: list[int], *, keep: int = 2) -> None:
    """Save some steps, resumed from the newest."""
    state = make_state(0.0)
    with holdfast.Checkpointer(home, state, keep=keep, quiet=True) as ckpt:
        ckpt.restore()
        for step in steps:
            nn.init.constant_(state["model"].weight, float(step))  # pyright: ignore[reportAttributeAccessIssue]
            ckpt.save(step).wait_durable()


def complete(home: Path) -> list[CheckpointId]:
    return candidates(list_home(open_store(home)))


class Stale:
    """Reads of one object of a local store fail, a number of times."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, times: int) -> None:
        self.left = times
        read, get = LocalStore.read_into, LocalStore.get

        def refuse(asked: str) -> None:
            if asked == name and self.left:
                self.left -= 1
                raise RetryLater(f"Could not read {asked}: Stale file handle (errno 116).")

        def read_into(store: LocalStore, asked: str, offset: int, buffer: memoryview) -> None:
            refuse(asked)
            read(store, asked, offset, buffer)

        def get_all(store: LocalStore, asked: str) -> bytes:
            refuse(asked)
            return get(store, asked)

        patch.setattr(LocalStore, "read_into", read_into)
        patch.setattr(LocalStore, "get", get_all)


@pytest.mark.parametrize("name", [names.part(20, 1, 0), names.manifest(20, 1)])
def test_after_one_stale_handle_the_newest_checkpoint_is_still_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    train(tmp_path / "home", [10, 20])
    Stale(monkeypatch, name, 1)
    with holdfast.Checkpointer(tmp_path / "home", make_state(0.0), quiet=True) as ckpt:
        assert ckpt.restore() == 20


def test_a_checkpoint_that_was_unreadable_survives_the_restore_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    train(home, [10, 20])
    with monkeypatch.context() as patch:
        Stale(patch, names.part(20, 1, 0), 10**9)
        state = make_state(0.0)
        with holdfast.Checkpointer(
            home, state, keep=2, quiet=True, reads=holdfast.Reads(patience=0.2)
        ) as ckpt:
            with pytest.raises(RetryLater, match=r"restore\(step=10\)") as caught:
                ckpt.restore()
            assert caught.value.step == 20
        with holdfast.Checkpointer(home, state, keep=2, quiet=True) as ckpt:
            assert ckpt.restore(step=10) == 10
            for step in (20, 30, 40, 50):
                ckpt.save(step).wait_durable()
    left = {(one.attempt, one.step) for one in list_home(open_store(home)).saved.values() if one.is_committed}
    assert (1, 20) in left
    assert holdfast.open(home, step=20, attempt=1).verify().is_good
    assert len(left) == 3, "and retention has deleted what it should"
    assert main(["ls", str(home)]) == 0
    assert "skipped by a restore: rank 0: " in capsys.readouterr().out
    assert main(["rm", str(home), "--step", "20", "--attempt", "1", "--yes"]) == 0
    assert (1, 20) not in complete(home)
    assert not list(home.glob("step-00000020/*a0001*"))


def test_a_damaged_checkpoint_is_not_deleted_before_the_user_has_seen_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    train(home, [10, 20])
    data = home / names.data(20, 1, 0)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    train(home, [20, 30, 40, 50])
    assert {(1, 20), (2, 40), (2, 50)} == set(complete(home))
    train(home, [60, 70])
    assert (1, 20) in complete(home), "nor by a later attempt"
