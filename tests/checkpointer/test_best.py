"""The best checkpoints by a recorded metric are kept, found again, and restored."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import nursery
from holdfast import Home, Keep, Local
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.home.metrics import read_document, read_metrics
from holdfast.checkpoint.store import open_store
from holdfast.errors import InvalidInput, NotFound
from making import kept
from stage.training import keeper_of, make_checkpointer, wait_until

LOSSES = {1: 5.0, 2: 1.0, 3: 3.0, 4: 2.0, 5: 4.0}
BEST_TWO = Keep(last=1, best=2, metric="loss")


def make(home: Path | Home, keep: Keep = BEST_TWO, **options: Any) -> holdfast.Checkpointer:
    return make_checkpointer(home, {"w": torch.zeros(100)}, keep=keep, memory="64MiB", **options)


def save_all(ckpt: holdfast.Checkpointer, losses: Mapping[int, float | None]) -> None:
    """Save each step with its loss, as the weights of its number."""
    for step, loss in losses.items():
        ckpt.state["w"].fill_(step)
        if loss is not None:
            ckpt.record(step, loss=loss)
        ckpt.save(step)
        ckpt.wait()


def train_until_killed(home: str, local: str = "None") -> None:
    """Train in a process that is killed after step 5; the loss is lowest at step 3."""
    script = f"""
import os, signal, torch
from holdfast import Checkpointer, Home, Keep, Local, Preemption
keep, watches = Keep(last=1, best=1, metric="loss"), [Preemption(signals=False)]
with Checkpointer({home}, {{"w": torch.zeros(100)}}, keep=keep, local={local}, watches=watches) as ckpt:
    for step in ckpt.steps(100):
        ckpt.state["w"].fill_(step + 1)
        ckpt.record(loss=abs(step + 1 - 3))
        ckpt.save(step + 1).wait_durable()
        if step + 1 == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    done = nursery.shared().run(["-c", script])
    assert done.returncode == -signal.SIGKILL, done.stderr


def metrics(home: Path, step: int, attempt: int = 1) -> dict[str, float]:
    return read_metrics(open_store(home), CheckpointId(attempt=attempt, step=step))


@pytest.mark.parametrize(("mode", "expected"), [("min", [2, 4, 5]), ("max", [1, 5])])
def test_the_best_survive_retention(tmp_path: Path, mode: str, expected: list[int]) -> None:
    with make(tmp_path, Keep(last=1, best=2, metric="loss", mode=mode)) as ckpt:
        save_all(ckpt, LOSSES)
    assert kept(tmp_path) == [(1, step) for step in expected]
    assert metrics(tmp_path, 5) == {"loss": 4.0}
    leftovers = [entry.name for entry in open_store(tmp_path).list("step-") if "metrics" in entry.name]
    assert len(leftovers) == len(expected)  # they go with their checkpoints


def test_without_a_finite_value_a_checkpoint_is_not_among_the_best(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        save_all(ckpt, {1: math.nan, 2: None, 3: -math.inf, 4: 7.0, 5: math.inf, 6: None})
    assert kept(tmp_path) == [(1, 4), (1, 6)]
    with make(tmp_path) as ckpt:
        assert ckpt.restore(best=True) == 4


def test_another_metric_does_not_count(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.record(step, accuracy=1.0 / step)
            ckpt.save(step)
            ckpt.wait()
    assert kept(tmp_path) == [(1, 3)]
    with make(tmp_path) as ckpt, pytest.raises(NotFound, match="finite value of 'loss'"):
        ckpt.restore(best=True)


def test_an_evaluation_after_the_save_counts_for_the_state_that_was_saved(tmp_path: Path) -> None:
    """The loop saves first and evaluates then; `record` is called without a step."""
    with make(tmp_path) as ckpt:
        for step in range(1, 5):
            ckpt.state["w"].add_(1)
            if ckpt.should_save(step) or step % 2 == 0:
                ckpt.save(step)
                ckpt.record(loss=abs(step - 2))
        ckpt.wait()
        assert metrics(tmp_path, 4) == {"loss": 2.0}
    assert metrics(tmp_path, 2) == {"loss": 0.0}


def test_a_value_recorded_after_training_continued_counts_for_the_next_save(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        ckpt.save(1)
        ckpt.state["w"].add_(1)
        ckpt.record(loss=1.0)
        ckpt.save(2)
        ckpt.wait()
        assert (metrics(tmp_path, 1), metrics(tmp_path, 2)) == ({}, {"loss": 1.0})


def test_a_late_value_with_its_step_counts_as_long_as_the_checkpoint_exists(tmp_path: Path) -> None:
    with make(tmp_path, Keep(last=2, best=1, metric="loss")) as ckpt:
        save_all(ckpt, {1: 1.0, 2: None, 3: None})
        ckpt.record(2, loss=0.5)  # better than that of step 1, which need not be kept any more
        ckpt.state["w"].fill_(4)
        ckpt.save(4)
        ckpt.wait()
        wait_until(lambda: (1, 1) not in kept(tmp_path))
        ckpt.record(1, loss=0.1)  # it is deleted
    assert kept(tmp_path) == [(1, 2), (1, 3), (1, 4)]
    assert list_home(open_store(tmp_path)).saved.keys() == {(1, 2), (1, 3), (1, 4)}


def test_a_best_checkpoint_of_a_killed_process_survives_the_next_attempts(tmp_path: Path) -> None:
    train_until_killed(f"{str(tmp_path)!r}")
    with make(tmp_path, Keep(last=1, best=1, metric="loss")) as ckpt:
        assert ckpt.restore() == 5
        save_all(ckpt, {6: 3.0, 7: 4.0})
    assert kept(tmp_path) == [(1, 3), (2, 7)]
    with make(tmp_path, Keep(last=1, best=1, metric="loss")) as ckpt:
        assert ckpt.restore(best=True) == 3
        assert ckpt.state["w"][0] == 3


def test_training_from_the_best_begins_a_new_line(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        save_all(ckpt, LOSSES)
        assert ckpt.restore(best=True) == 2
        assert list(ckpt.steps(3)) == [2]
    assert kept(tmp_path) == [(1, 2), (1, 4), (1, 5), (2, 3)]
    with make(tmp_path) as ckpt:
        assert ckpt.restore() == 3  # of the new line; 4 and 5 are superseded
        save_all(ckpt, {4: 1.5, 5: 9.0})
    assert kept(tmp_path) == [(1, 2), (3, 4), (3, 5)]


def test_a_damaged_best_checkpoint_is_skipped_for_the_next_best(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        save_all(ckpt, LOSSES)
    data = tmp_path / names.data(2, 1, 0)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with make(tmp_path) as ckpt:
        assert ckpt.restore(best=True) == 4
    data = tmp_path / names.data(4, 1, 0)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    with make(tmp_path) as ckpt:
        assert ckpt.restore(best=True) == 5  # the newest has a value too
    (tmp_path / names.metrics(5, 1)).write_bytes(b"{}")
    with make(tmp_path) as ckpt, pytest.raises(holdfast.Corrupt, match="none could be restored"):
        ckpt.restore(best=True)


def test_a_checkpoint_whose_metrics_cannot_be_read_is_not_deleted(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        save_all(ckpt, {1: 9.0, 2: 1.0, 3: 2.0})
    (tmp_path / names.metrics(2, 1)).write_bytes(b"{}")
    with make(tmp_path) as ckpt:
        ckpt.restore()
        save_all(ckpt, {4: 0.5, 5: 0.6, 6: 7.0})
    assert kept(tmp_path) == [(1, 2), (2, 4), (2, 5), (2, 6)]


def test_an_empty_home_has_no_best_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path) as ckpt:
        assert ckpt.restore(best=True) is None
        assert list(ckpt.steps(2)) == [0, 1]


def test_the_best_needs_a_metric_and_no_step(tmp_path: Path) -> None:
    for keep, step, reason in ((Keep(last=1), None, "needs a metric"), (BEST_TWO, 3, "not both")):
        with make(tmp_path, keep) as ckpt, pytest.raises(InvalidInput, match=reason):
            ckpt.restore(step, best=True)


def test_open_finds_the_best(tmp_path: Path) -> None:
    with make(tmp_path, Keep(last=None)) as ckpt:
        save_all(ckpt, {**LOSSES, 6: None})
    best = holdfast.open(tmp_path, best="loss")
    assert (best.step, best.metrics()) == (2, {"loss": 1.0})
    assert holdfast.open(tmp_path, best="loss", mode="max").step == 1
    assert holdfast.open(tmp_path).metrics() == {}
    with pytest.raises(NotFound, match="finite value of 'accuracy'"):
        holdfast.open(tmp_path, best="accuracy")
    with pytest.raises(InvalidInput, match="not both"):
        holdfast.open(tmp_path, 3, best="loss")


def test_the_best_is_sent_home_although_it_is_not_due_there(tmp_path: Path) -> None:
    """Only the newest is kept in the local folder, and nothing is due in home before the end."""
    home, local = tmp_path / "home", tmp_path / "local"
    with make(Home(home, every=100), Keep(last=1, best=1, metric="loss"), local=Local(local, keep=1)) as ckpt:
        for step in range(1, 7):
            ckpt.should_save(step)
            ckpt.state["w"].fill_(step)
            ckpt.record(step, loss=abs(step - 3))
            ckpt.save(step).wait_durable()
    assert kept(home) == [(1, 3), (1, 6)]
    assert kept(local)[-1] == (1, 6)
    assert holdfast.open(home, best="loss").verify().is_good
    with make(home, local=tmp_path / "another") as ckpt:
        assert ckpt.restore(best=True) == 3


def test_the_best_of_a_killed_process_comes_home(tmp_path: Path) -> None:
    """Its keeper sends it after the newest. The next attempt may delete both from the local folder."""
    home, local = tmp_path / "home", tmp_path / "local"
    train_until_killed(f"Home({str(home)!r}, every=100)", f"Local({str(local)!r}, keep=1)")
    wait_until(lambda: kept(home) == [(1, 3), (1, 5)])


def test_the_best_comes_home_from_a_loop_that_only_saves(tmp_path: Path) -> None:
    """One rank knows its values without an exchange."""
    home, local = tmp_path / "home", tmp_path / "local"
    with make(Home(home, every=100), Keep(last=1, best=1, metric="loss"), local=Local(local, keep=1)) as ckpt:
        for step in range(1, 7):
            ckpt.save(step).wait_durable()
            ckpt.record(step, loss=abs(step - 3))
    assert kept(home) == [(1, 3), (1, 6)]


def test_a_metric_that_improves_with_each_save_does_not_send_each_save_home(tmp_path: Path) -> None:
    """The best goes home beside a save that is due there, so `every` limits the uploads."""
    home, local = tmp_path / "home", tmp_path / "local"
    keep = Keep(last=100, best=1, metric="loss")
    with make(Home(home, every=5), keep, local=Local(local, keep=1)) as ckpt:
        for step in range(1, 13):
            ckpt.should_save(step)
            ckpt.save(step).wait_durable()
            ckpt.record(step, loss=-step)
            if step % 5 == 0:
                wait_until(lambda step=step: {(1, step), (1, step - 1)} <= set(kept(home)))
    assert kept(home) == [(1, step) for step in (4, 5, 9, 10, 12)]


@pytest.mark.parametrize("newest", [2, 4])
def test_a_late_value_reaches_home(tmp_path: Path, newest: int) -> None:
    """Also if the local folder, which keeps two checkpoints, has deleted that of the value."""
    home, local = tmp_path / "home", tmp_path / "local"
    with make(home, Keep(last=5, best=1, metric="loss"), local=local) as ckpt:
        save_all(ckpt, dict.fromkeys(range(1, newest)) | {newest: 2.0})
        wait_until(lambda: len(kept(local)) == 2)
        ckpt.record(1, loss=1.0)
    assert metrics(home, 1) == {"loss": 1.0}


def test_a_keeper_that_is_killed_after_the_close_loses_no_late_value(tmp_path: Path) -> None:
    """As on a machine without memory: nothing else would have told of the loss."""
    ckpt = make(tmp_path, Keep(last=5, best=1, metric="loss"))
    save_all(ckpt, {1: None})
    keeper = keeper_of(ckpt)
    killed = keeper.pid
    os.kill(killed, signal.SIGSTOP)
    ckpt.record(1, loss=1.0)
    closing = threading.Thread(target=ckpt.close)
    closing.start()
    wait_until(lambda: keeper._close is not None)
    os.kill(killed, signal.SIGKILL)
    with pytest.warns(holdfast.SaveWarning, match="died"):
        closing.join()
    assert metrics(tmp_path, 1) == {"loss": 1.0}


def test_every_reader_uses_the_mode_that_the_run_recorded(tmp_path: Path) -> None:
    with make(tmp_path, Keep(last=None, metric="loss", mode="max")) as ckpt:
        save_all(ckpt, LOSSES)
    assert holdfast.open(tmp_path, best="loss").step == 1
    assert holdfast.open(tmp_path, best="loss", mode="max").step == 1
    both = 'asked for by mode="min".*keeps its best checkpoints by mode="max" of \'loss\''
    with pytest.raises(InvalidInput, match=both):
        holdfast.open(tmp_path, best="loss", mode="min")
    with make(tmp_path, Keep(last=None, metric="loss")) as ckpt, pytest.raises(InvalidInput, match=both):
        ckpt.restore(best=True)


def test_a_run_that_changes_its_mode_is_read_by_the_new_one(tmp_path: Path) -> None:
    with make(tmp_path, Keep(last=None, metric="loss", mode="max")) as ckpt:
        save_all(ckpt, {1: 5.0, 2: 1.0})
    with make(tmp_path, Keep(last=None, metric="loss")) as ckpt:
        assert ckpt.restore() == 2
        save_all(ckpt, {3: 3.0})
    assert holdfast.open(tmp_path, best="loss").step == 2


def test_a_value_measured_on_weights_that_were_not_saved_is_marked(tmp_path: Path) -> None:
    """An evaluation between two saves: the checkpoint after it has the value, and other weights."""
    ckpt = make(tmp_path, Keep(last=None, best=1, metric="loss"))
    for step, save in ((80, 80), (96, 100)):
        ckpt.record(step, loss=1 / step)
        ckpt.save(save)
    with pytest.warns(holdfast.SaveWarning, match=r"step 96, which was not saved.*ckpt\.save\(step \+ 1\)"):
        ckpt.close()
    found = read_document(open_store(tmp_path), CheckpointId(attempt=1, step=100))
    assert (found.values, found.of_steps, found.modes) == ({"loss": 1 / 96}, {"loss": 96}, {"loss": "min"})
    assert read_document(open_store(tmp_path), CheckpointId(attempt=1, step=80)).of_steps == {}


def test_a_save_at_the_evaluation_keeps_the_weights_that_were_measured(tmp_path: Path) -> None:
    with make(tmp_path, Keep(last=1, best=1, metric="loss"), every=4) as ckpt:
        for step in ckpt.steps(8):
            ckpt.state["w"].fill_(step + 1)
            if step + 1 in (3, 6):
                ckpt.save(step + 1)
                ckpt.record(loss=step)
        ckpt.wait()
    best = holdfast.open(tmp_path, best="loss")
    assert (best.step, float(best.tensor("w")[0])) == (3, 3.0)
