"""The Checkpointer: its saves, refusals, messages and restores."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import holdfast
from holdfast.checkpoint.policy import EverySteps, EveryTime
from holdfast.errors import Corrupt, InvalidInput, NotFound, ResumeWarning, RetryLater, Unsupported
from making import steps_kept
from stage.training import keeper_of, make_checkpointer, make_model, snapshot, train

WAIT_S = 600.0


def make_state() -> dict[str, Any]:
    model = make_model()
    return {"model": model, "optimizer": AdamW(model.parameters(), lr=0.1), "epoch": 0}


@pytest.mark.parametrize("uses_local", [False, True])
def test_variables_of_the_training_are_freed_without_the_garbage_collector(
    home: Path, tmp_path: Path, uses_local: bool
) -> None:
    """They may be tensors on a GPU, or a data loader that would be taken for one in use."""
    importlib.import_module("torch._dynamo")  # its first import leaves cycles of its own
    options = {"local": str(tmp_path / "near")} if uses_local else {}

    def start() -> weakref.ref[torch.Tensor]:
        mine = torch.ones(2)
        with make_checkpointer(home, {"x": torch.ones(2)}, **options) as ckpt:
            step = ckpt.restore() or 0
            ckpt.save(step + 1)
        return weakref.ref(mine)

    gc.collect()
    gc.disable()
    try:
        assert [start()(), start()()] == [None, None]
    finally:
        gc.enable()


# -- when ----------------------------------------------------------------------------------------------------


def test_the_loop_saves_when_due_and_at_the_end_and_marks_the_run_as_done(home: Path) -> None:
    state = make_state()
    with make_checkpointer(home, state, every=3, keep=None) as ckpt:
        seen = []
        for step in ckpt.steps(8):
            seen.append(step)
            train(state["model"], state["optimizer"])
    assert seen == list(range(8))
    assert steps_kept(home) == [3, 6, 8]
    done = json.loads((home / "done.json").read_text())
    assert (done["step"], done["attempt"]) == (8, 1)


def test_steps_and_time_make_a_save_due_each_by_its_own_rule(home: Path) -> None:
    """Steps are counted, time is measured; policies compose to any depth."""
    hour = EveryTime(3600)
    with make_checkpointer(
        home / "a", {"x": torch.ones(1)}, every=hour | EverySteps(3) | EverySteps(5)
    ) as ckpt:
        assert [step for step in range(1, 11) if ckpt.should_save(step)] == [3, 5, 6, 9, 10]
    with make_checkpointer(home / "b", {"x": torch.ones(1)}, every="1ms") as ckpt:
        ckpt.should_save(1)
        threading.Event().wait(0.002)
        assert ckpt.should_save(2)
    with make_checkpointer(home / "c", {"x": torch.ones(1)}, every="1h") as ckpt:
        assert not any(ckpt.should_save(step) for step in range(1, 5))


def test_auto_measures_one_save_first(home: Path) -> None:
    with make_checkpointer(home, {"x": torch.ones(1)}, every="auto") as ckpt:
        due = []
        for step in range(1, 16):
            if ckpt.should_save(step):
                due.append(step)
                ckpt.save(step).wait_durable()
        assert due[0] == 10
        assert ckpt._components.cadence.meter.save_cost_s is not None


# -- save ----------------------------------------------------------------------------------------------------


def test_the_same_step_twice_is_one_save_and_an_older_one_is_refused(home: Path) -> None:
    with make_checkpointer(home, {"x": torch.ones(1)}) as ckpt:
        first = ckpt.save(5)
        assert ckpt.save(5) is first
        with pytest.raises(InvalidInput, match=r"Step 4 comes after step 5 was saved.*restore\(step="):
            ckpt.save(4)
    assert steps_kept(home) == [5]


def test_saving_over_checkpoints_that_were_not_restored_is_refused(home: Path) -> None:
    """Who forgets restore() must not lose what is there to retention."""
    with make_checkpointer(home, {"x": torch.ones(2)}) as ckpt:
        ckpt.save(4)
    with make_checkpointer(home, {"x": torch.zeros(2)}) as ckpt:
        with pytest.raises(InvalidInput, match=r"newest of step 4, and restore\(\) was not called"):
            ckpt.save(1)
        assert ckpt.restore() == 4
        ckpt.save(5)
    assert steps_kept(home) == [4, 5]


def test_waiting_that_runs_out_forgets_nothing(home: Path) -> None:
    """A save that is still under way after wait(timeout) is waited for by the next wait()."""
    with make_checkpointer(home, {"x": torch.ones(1)}) as ckpt:
        ckpt.save(1).wait_durable()
        assert ckpt.latest_step() == 1
        os.kill(keeper_of(ckpt).pid, signal.SIGSTOP)
        ckpt.save(2)
        save = ckpt.save(3)
        for _ in range(2):
            with pytest.raises(RetryLater, match="not durable after"):
                ckpt.wait(0.01)
        assert (ckpt.latest_step(), save.failed) == (1, None)
        os.kill(keeper_of(ckpt).pid, signal.SIGCONT)
        ckpt.wait()
        assert (ckpt.latest_step(), save.state) == (3, "durable")


def test_a_value_that_cannot_be_saved_is_named_and_training_can_continue(home: Path) -> None:
    state: dict[str, Any] = {"x": torch.ones(1), "facts": {"a": [1, 2]}}
    with make_checkpointer(home, state) as ckpt:
        state["facts"]["a"].append(object())
        with pytest.raises(InvalidInput, match=r"facts.*a.*2"):
            ckpt.save(1)
        assert not list(home.glob("step-*"))
        state["facts"]["a"].pop()
        ckpt.save(1)
    assert holdfast.open(home).values()["facts"] == {"a": [1, 2]}


# -- restore -------------------------------------------------------------------------------------------------


def test_everything_comes_back(home: Path) -> None:
    state = make_state() | {"epoch": 3, "seen": {"a": (1, 2)}}
    train(state["model"], state["optimizer"])
    with make_checkpointer(home, state) as ckpt:
        ckpt.save(1)
        drawn = torch.rand(3)
    other = make_state() | {"seen": None}
    with make_checkpointer(home, other) as ckpt:
        assert ckpt.restore() == 1
        assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(snapshot(other)[name], tensor) for name, tensor in snapshot(state).items())
    assert (other["epoch"], other["seen"]) == (3, {"a": (1, 2)})


def test_an_empty_home_restores_nothing(home: Path) -> None:
    with make_checkpointer(home, {"x": torch.ones(1)}) as ckpt:
        assert ckpt.restore() is None
        assert ckpt.latest_step() is None
        with pytest.raises(NotFound):
            ckpt.restore(step=3)


def test_a_prepared_training_has_its_attempt_before_the_first_save(home: Path) -> None:
    with make_checkpointer(home, make_state()) as ckpt:
        ckpt.prepare()
        assert not home.exists(), "restore() has not chosen what the attempt follows"
    with make_checkpointer(home, make_state()) as ckpt:
        ckpt.restore()
        ckpt.prepare()
        assert home.exists(), "it is claimed"
        ckpt.save(1)
    with make_checkpointer(home, make_state()) as ckpt:
        ckpt.restore()
        ckpt.prepare()
        ckpt.save(2)
        ckpt.wait()
        assert ckpt.restore(step=1) == 1
        ckpt.save(3)
    with make_checkpointer(home, make_state()) as ckpt:
        assert ckpt.restore() == 3


def test_going_back_begins_a_new_attempt_that_the_run_then_continues(home: Path) -> None:
    """Steps saved after going back win over higher steps that were saved before."""
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state, keep=None) as ckpt:
        assert (ckpt.latest_step(), ckpt.all_steps()) == (None, [])
        for step in (10, 20, 30):
            state["x"].fill_(step)
            ckpt.save(step)
        assert ckpt.restore(step=10) == 10
        assert state["x"].item() == 10
        assert (ckpt.latest_step(), ckpt.all_steps()) == (30, [10, 20, 30])
        state["x"].fill_(15)
        ckpt.save(15).wait_durable(WAIT_S)
        assert (ckpt.latest_step(), ckpt.all_steps()) == (15, [10, 15, 20, 30])
    with make_checkpointer(home, state) as ckpt:
        assert ckpt.restore() == 15
        assert state["x"].item() == 15
        assert ckpt.restore(step=30) == 30


def test_names_may_differ_on_request(home: Path) -> None:
    with make_checkpointer(home, {"old": torch.full((2,), 5.0), "gone": torch.ones(1)}) as ckpt:
        ckpt.save(1)
    state = {"new": torch.zeros(2), "added": torch.full((1,), 9.0)}
    with make_checkpointer(home, state) as ckpt:
        with pytest.raises(InvalidInput, match="added"):
            ckpt.restore(rename={"old": "new"})
        assert state["new"].tolist() == [0, 0]
        with pytest.warns(ResumeWarning, match="left unchanged: added"):
            assert ckpt.restore(rename={"old": "new"}, strict=False) == 1
    assert (state["new"].tolist(), state["added"].tolist()) == ([5, 5], [9])


def test_only_the_named_keys_are_restored(home: Path) -> None:
    with make_checkpointer(home, {"a": torch.ones(1), "b": torch.ones(1)}) as ckpt:
        ckpt.save(1)
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    with make_checkpointer(home, state) as ckpt:
        assert ckpt.restore(only=["b"]) == 1
    assert (state["a"].item(), state["b"].item()) == (0, 1)


def test_damage_everywhere_is_an_error_and_never_a_fresh_start(home: Path) -> None:
    with make_checkpointer(home, {"x": torch.ones(100)}) as ckpt:
        ckpt.save(1)
    for path in home.glob("step-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with make_checkpointer(home, {"x": torch.ones(100)}) as ckpt, pytest.raises(Corrupt, match="step 1"):
        ckpt.restore()


# -- who may use it ------------------------------------------------------------------------------------------


def test_a_closed_checkpointer_is_of_no_use(home: Path) -> None:
    ckpt = make_checkpointer(home, {"x": torch.ones(1)})
    ckpt.close()
    for use in (lambda: ckpt.save(1), lambda: ckpt.should_save(1), ckpt.restore, ckpt.wait):
        with pytest.raises(InvalidInput, match="closed"):
            use()


def test_arguments_that_mean_nothing_are_refused(home: Path) -> None:
    for name, value in (("every", 0), ("every", "soon"), ("keep", 0), ("memory", "much")):
        with pytest.raises(InvalidInput, match=f"(?i){name}"):
            make_checkpointer(home, {"x": torch.ones(1)}, **{name: value})
    assert not home.exists()


def test_a_home_that_no_other_process_can_reach_is_refused() -> None:
    with pytest.raises(Unsupported, match="memory of this process"):
        make_checkpointer("memory://mine", {"x": torch.ones(1)})


def test_going_back_within_a_loop_leaves_no_step_to_save(home: Path) -> None:
    """The state is that of step 4 again, so leaving the loop must not save it as step 7."""
    state = {"x": torch.zeros(3)}
    with make_checkpointer(home, state, every=2) as ckpt:
        for step in ckpt.steps(10):
            state["x"] += 1
            if step == 6:
                ckpt.restore(step=4)
                break
    assert steps_kept(home) == [2, 4, 6]
    assert torch.equal(state["x"], torch.full((3,), 4.0))


def test_a_failed_save_of_a_preempted_run_leaves_the_block_closed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RetryLater("the save failed")

    ckpt = make_checkpointer(home, {"x": torch.ones(3)})
    monkeypatch.setattr(ckpt._training, "end_preempted", fail)
    ckpt.save(1).wait_durable(WAIT_S)
    with pytest.raises(RetryLater, match="the save failed"), ckpt:
        raise ZeroDivisionError
    assert not ckpt._training.is_open
