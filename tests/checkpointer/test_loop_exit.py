"""Ends of training loops: which of them save, finish or do neither, and what the next start makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from tqdm import tqdm

import holdfast
from holdfast.errors import InvalidInput
from making import steps_kept
from nursery import shared
from stage.training import make_checkpointer, make_model, train

Loop = Callable[[holdfast.Checkpointer, Callable[[], None]], object]


def make_state() -> dict[str, Any]:
    model = make_model()
    return {"model": model, "optimizer": AdamW(model.parameters(), lr=0.1)}


def break_before(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for step in ckpt.steps(10):
        if step == 5:
            break
        step_once()
    return None


def break_after(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for step in ckpt.steps(10):
        step_once()
        if step == 4:
            break
    return None


def return_within(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for step in ckpt.steps(10):
        step_once()
        if step == 4:
            return step
    return None


def break_in_a_handler(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    batches = iter(range(5))
    for _ in ckpt.steps(10):
        try:
            next(batches)
        except StopIteration:
            break
        step_once()
    return None


def make_five(steps: Iterable[int], step_once: Callable[[], None]) -> None:
    for step in steps:
        step_once()
        if step == 4:
            break


def data_that_ends(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for _ in zip(ckpt.steps(10), range(5), strict=False):
        step_once()
    return None


def data_that_ends_first(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for _ in zip(range(5), ckpt.steps(10), strict=False):
        step_once()
    return None


def progress_bar(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for step in tqdm(ckpt.steps(10), disable=None):
        step_once()
        if step == 4:
            break
    return None


def progress_bar_with_a_name(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    bar = tqdm(ckpt.steps(10), disable=None)
    make_five(bar, step_once)
    return bar


def iterator_that_is_kept(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    steps = ckpt.steps(10)
    make_five(steps, step_once)
    return steps


def closed(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    with contextlib.closing(ckpt.steps(10)) as steps:  # type: ignore[type-var]
        make_five(steps, step_once)
    return None


def by_hand(ckpt: holdfast.Checkpointer, step_once: Callable[[], None]) -> object:
    for step in range(1, 6):
        step_once()
        if ckpt.should_save(step):
            ckpt.save(step)
    return None


ORDERLY: list[Loop] = [
    *(break_before, break_after, return_within, break_in_a_handler, data_that_ends, data_that_ends_first),
    *(progress_bar, progress_bar_with_a_name, iterator_that_is_kept, closed, by_hand),
]


@pytest.mark.parametrize("loop", ORDERLY, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("kind", ["optimizer", "tensor"])
def test_a_loop_left_in_order_is_saved_with_the_number_of_steps_that_were_made(
    home: Path, loop: Loop, kind: str
) -> None:
    """With 5 steps made, however the loop is left, and whatever the state is made of."""
    state: dict[str, Any] = make_state() if kind == "optimizer" else {"x": torch.zeros(1)}

    def step_once() -> None:
        if kind == "optimizer":
            train(state["model"], state["optimizer"])
        else:
            state["x"] += 1

    with make_checkpointer(home, state, every=3) as ckpt:
        kept = loop(ckpt, step_once)
        del kept
    assert steps_kept(home) == [3, 5]
    assert not (home / "done.json").exists()
    found = holdfast.open(home)
    if kind == "tensor":
        assert found["x"].item() == 5
    else:
        assert torch.equal(found["model.0.weight"], state["model"][0].weight)


def test_the_state_is_that_of_the_loop_though_it_is_changed_after_it(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state) as ckpt:
        for step in ckpt.steps(10):
            state["x"] += 1
            if step == 4:
                break
        state["x"].fill_(-1)  # such as weights swapped for averaged ones, to evaluate them
    assert holdfast.open(home)["x"].item() == 5


def test_a_loop_left_before_anything_was_trained_saves_nothing(home: Path) -> None:
    with make_checkpointer(home, {"x": torch.zeros(1)}) as ckpt:
        for _ in ckpt.steps(10):
            break
    assert steps_kept(home) == []


def raise_in_loop(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    for step in ckpt.steps(10):
        state["x"] += 1
        if step == 4:
            raise ValueError("in the middle")


def test_an_exception_saves_nothing_and_what_was_saved_before_becomes_durable(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with pytest.raises(ValueError, match="middle"), make_checkpointer(home, state, every=3) as ckpt:
        raise_in_loop(ckpt, state)
    make_checkpointer(home, {"x": torch.zeros(1)}).close()
    with make_checkpointer(home, {"x": torch.zeros(1)}) as ckpt:
        assert ckpt.restore() == 3


def raise_by_hand(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    try:
        for step in range(1, 6):
            state["x"] += 1
            if ckpt.should_save(step):
                ckpt.save(step)
            if step == 5:
                int("in the middle")
    finally:
        ckpt.close()


def test_an_exception_that_is_caught_around_the_loop_saves_nothing(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state, every=3) as ckpt, contextlib.suppress(ValueError):
        raise_in_loop(ckpt, state)
    assert steps_kept(home) == [3]


def test_an_exception_that_is_caught_beside_the_loop_saves_nothing(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state, every=3) as ckpt:
        try:
            for step in ckpt.steps(10):
                state["x"] += 1
                if step == 4:
                    int("in the middle")
        except ValueError:
            pass
    assert steps_kept(home) == [3]


def test_closing_in_a_finally_after_an_exception_saves_nothing(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    ckpt = make_checkpointer(home, state, every=3)
    with pytest.raises(ValueError, match="middle"):
        raise_by_hand(ckpt, state)
    assert steps_kept(home) == [3]


def test_steps_after_the_last_should_save_are_not_saved_under_a_wrong_number(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = make_state()
    with make_checkpointer(home, state, every=2, quiet=False) as ckpt:
        for step in range(1, 4):
            train(state["model"], state["optimizer"])
            if ckpt.should_save(step):
                ckpt.save(step)
        train(state["model"], state["optimizer"])
        with pytest.raises(InvalidInput, match=r"Call finish\(step\)"):
            ckpt.finish()
    assert steps_kept(home) == [2]
    assert "training continued after step 3" in capfd.readouterr().err


def test_the_next_start_of_a_hand_written_loop_that_finished_detects_it(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state, every=100) as ckpt:
        for step in range(1, 6):
            state["x"] += 1
            ckpt.should_save(step)
        ckpt.finish()
    assert steps_kept(home) == [5]
    assert json.loads((home / "done.json").read_text())["step"] == 5
    with make_checkpointer(home, state, quiet=False) as ckpt:
        assert ckpt.restore() == 5
    assert "this run was finished at step 5" in capfd.readouterr().err


def test_finish_takes_a_step_if_the_loop_never_calls_should_save(home: Path) -> None:
    with make_checkpointer(home, {"x": torch.zeros(1)}) as ckpt:
        with pytest.raises(InvalidInput, match=r"Call finish\(step\)"):
            ckpt.finish()
        ckpt.finish(7)
    assert steps_kept(home) == [7]
    assert (home / "done.json").exists()


def test_a_finished_run_reports_it_and_how_to_train_further(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with make_checkpointer(home, {"x": torch.ones(2)}, every=2) as ckpt:
        list(ckpt.steps(4))
    written = (home / "done.json").read_bytes()
    capfd.readouterr()
    with make_checkpointer(home, {"x": torch.zeros(2)}, every=2, quiet=False) as ckpt:
        assert list(ckpt.steps(4)) == []
        assert ckpt.latest_step() == 4
    assert steps_kept(home) == [2, 4]
    said = capfd.readouterr().err
    assert "this run was finished at step 4" in said
    assert "all 4 steps are done, so nothing is trained; to train further, raise the total" in said
    assert (home / "done.json").read_bytes() == written
    with make_checkpointer(home, {"x": torch.zeros(2)}, every=100, quiet=False) as ckpt:
        steps = ckpt.steps(8)
        assert next(steps) == 4
        ckpt.save(5).wait_durable()
        assert not (home / "done.json").exists(), "it is being trained again"
        steps.close()  # type: ignore[attr-defined]
    assert "training continues from step 4 to step 8" in capfd.readouterr().err


def test_after_its_loop_a_training_can_be_terminated_again(tmp_path: Path) -> None:
    script = """
import os, signal, torch, holdfast
state = {"x": torch.zeros(1)}
ckpt = holdfast.Checkpointer("home", state, quiet=True)
for step in ckpt.steps(10):
    state["x"] += 1
    if step == 4:
        break
print("evaluating", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""
    done = shared().run(["-c", script], cwd=tmp_path)
    assert done.stdout == "evaluating\n", done.stderr
    assert done.returncode == -signal.SIGTERM
    with make_checkpointer(tmp_path / "home", {"x": torch.zeros(1)}) as ckpt:
        assert ckpt.restore() == 5, "staged at the break, made durable by the keeper"


def test_a_child_forked_in_the_loop_saves_nothing_when_it_ends(home: Path) -> None:
    state = {"x": torch.zeros(1)}
    with make_checkpointer(home, state) as ckpt:
        for step in ckpt.steps(4):
            state["x"] += 1
            if step == 1:
                child = os.fork()
                if child == 0:
                    os._exit(0 if _leave_in_child(ckpt) else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert steps_kept(home) == [4]


def _leave_in_child(ckpt: holdfast.Checkpointer) -> bool:
    ckpt._training.leave(is_orderly=True)
    ckpt.close()
    return True
