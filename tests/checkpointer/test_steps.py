"""Numbers of steps are checked where they come in: what is refused loses nothing, and the keeper lives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import Conflict, InvalidInput
from holdfast.system.units import MAX_STEP, parse_step
from making import steps_kept
from stage.training import keeper_of, make_checkpointer

WRONG = [
    *(True, np.bool_(True), torch.tensor(True), "5", None, 5.0, np.float32(5), torch.tensor(5.0)),
    *(float("nan"), float("inf"), -1, np.int64(-3), torch.tensor(-3), MAX_STEP + 1, 2**63, 2**200),
    *([5], (5,), np.array([1, 2]), torch.tensor([1, 2]), torch.empty(0), b"5", 5j, object()),
]
RIGHT = [5, np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), torch.tensor(5, dtype=torch.int32)]
CALLS: dict[str, Callable[[holdfast.Checkpointer, Any], object]] = {
    "save": lambda ckpt, step: ckpt.save(step),
    "should_save": lambda ckpt, step: ckpt.should_save(step),
    "record": lambda ckpt, step: ckpt.record(step, loss=1.0),
    "restore": lambda ckpt, step: ckpt.restore(step=step),
    "steps": lambda ckpt, step: next(iter(ckpt.steps(step)), None),
    "send_home": lambda ckpt, step: ckpt.send_home(step),
}
MAY_BE_NONE = ("record", "restore")


@pytest.mark.parametrize("call", CALLS)
def test_an_invalid_step_is_refused_and_the_next_save_is_durable(tmp_path: Path, call: str) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        ckpt.save(1).wait_durable()
        keeper = keeper_of(ckpt).pid
        for wrong in WRONG:
            if wrong is None and call in MAY_BE_NONE:
                continue
            with pytest.raises(InvalidInput, match=r"a step is a whole number.*Nothing was done"):
                CALLS[call](ckpt, wrong)
        ckpt.save(2).wait_durable()
        assert keeper_of(ckpt).pid == keeper
    assert holdfast.open(tmp_path / "home").step == 2


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: type(step).__name__)
def test_any_integer_scalar_is_a_step(tmp_path: Path, step: Any) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        ckpt.should_save(step)
        save = ckpt.save(step)
        assert (save.step, type(save.step)) == (5, int)
        save.wait_durable()
        assert ckpt.restore(step=step) == 5
        ckpt.record(step, loss=1.0)
    assert holdfast.open(tmp_path / "home").step == 5


def test_a_whole_float_is_refused_with_the_call_that_works() -> None:
    with pytest.raises(InvalidInput, match=r"found 5\.0 \(float\).*Write int\(\.\.\.\) around it, here 5"):
        parse_step(5.0, "save()")


def test_the_greatest_step_can_be_saved_and_restored(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}) as ckpt:
        ckpt.save(MAX_STEP).wait_durable()
        assert ckpt.restore() == MAX_STEP


def make_trained(home: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a new state of a home that has step 5, and its saved content."""
    saved = {"model": torch.nn.Linear(2, 1), "note": torch.ones(2)}
    with make_checkpointer(home, saved) as ckpt:
        ckpt.save(4)
        ckpt.save(5)
    return {"model": torch.nn.Linear(2, 1), "note": torch.zeros(2)}, saved


RESTORES: dict[str, Callable[[holdfast.Checkpointer], int | None]] = {
    "restore": lambda ckpt: ckpt.restore(),
    "a step": lambda ckpt: ckpt.restore(step=4),
    "only": lambda ckpt: ckpt.restore(only=["model"]),
    "continue_from": lambda ckpt: ckpt.continue_from(),
    "prepared": lambda ckpt: (ckpt.restore(), ckpt.prepare())[0],
}


@pytest.mark.parametrize("how", RESTORES)
def test_a_loop_after_a_restore_leaves_what_the_script_set(tmp_path: Path, how: str) -> None:
    state, saved = make_trained(tmp_path / "home")
    before = state["model"].weight.detach().clone()
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        step = RESTORES[how](ckpt)
        state["note"].fill_(7.0)
        assert step is not None
        assert next(iter(ckpt.steps(step + 1))) == step
    expected = before if how == "continue_from" else saved["model"].weight
    assert torch.equal(state["model"].weight, expected)
    assert state["note"].tolist() == [7.0, 7.0]


def test_a_loop_after_a_restore_that_found_nothing_begins_at_0(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        assert ckpt.restore() is None
        state["x"].fill_(3.0)
        assert list(ckpt.steps(2)) == [0, 1]
    assert holdfast.open(tmp_path / "home")["x"].tolist() == [3.0]


def test_a_loop_after_a_restore_refuses_a_checkpoint_that_came_in_between(tmp_path: Path) -> None:
    state, _ = make_trained(tmp_path / "home")
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        assert ckpt.restore() == 5
        with make_checkpointer(tmp_path / "home", {**state}) as other:
            other.restore()
            other.save(6)
        with pytest.raises(Conflict, match="step 6"):
            next(iter(ckpt.steps(10)))
    assert holdfast.open(tmp_path / "home").step == 6


def test_a_loop_without_a_restore_of_the_script_restores(tmp_path: Path) -> None:
    state, saved = make_trained(tmp_path / "home")
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        assert next(iter(ckpt.steps(9))) == 5
        assert torch.equal(state["model"].weight, saved["model"].weight)
        assert list(ckpt.steps(6)) == [5], "and so does a second loop"


def test_a_loop_without_a_policy_saves_what_the_script_saves_and_its_last_step(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}, every=None, keep=None) as ckpt:
        for step in ckpt.steps(700):
            if step == 9:
                ckpt.save(step + 1)
    assert steps_kept(tmp_path / "home") == [10, 700]
