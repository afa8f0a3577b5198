"""Tensors without an owner: copied before save() returns until they prove to be written only after a step."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import holdfast
from holdfast.checkpoint.stage.stager import CalmTensors
from holdfast.checkpoint.stage.watch import Watcher
from holdfast.errors import InvalidInput, SaveWarning
from stage.training import (
    CopyGate,
    check_saved,
    make_checkpointer,
    make_model,
    make_plan,
    make_training,
    snapshot,
    train,
)

pytestmark = pytest.mark.skipif(Watcher().refusal is not None, reason="this kernel keeps no record of writes")

SIZE = 20_000  # elements: large enough to be copied beside the training


@dataclass
class Averaged:
    """A training with an average of weights that nothing owns, and a gate in front of background copies."""

    home: Path
    ckpt: holdfast.Checkpointer
    gate: CopyGate
    model: nn.Module
    optimizer: SGD
    average: torch.Tensor
    saved: int = 0

    @property
    def state(self) -> dict[str, Any]:
        """The state that is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    def step(self) -> None:
        """Train one step, and update the average after it."""
        train(self.model, self.optimizer)
        self.average.lerp_(torch.rand(SIZE), 0.1)

    def is_calm(self) -> bool:
        """Save, and return True if the average was copied in the background, as its memory shows."""
        self.gate.opened.clear()
        self.saved += 1
        expected, save = snapshot(self.state), self.ckpt.save(self.saved)
        staging = self.ckpt._components.pipeline.stager._current
        assert staging is not None
        found = self.average.data_ptr() in staging.addresses
        self.gate.opened.set()
        save.wait_durable()
        check_saved(self.home, self.saved, expected)
        return found


@pytest.fixture
def averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = make_model()
    optimizer, average = SGD(model.parameters(), lr=0.1, momentum=0.9), torch.rand(SIZE)
    train(model, optimizer)  # its momentum is there from the first save on
    state = {"model": model, "optimizer": optimizer, "average": average}
    gate = CopyGate(monkeypatch)
    gate.open_when_stepping([optimizer])
    with make_checkpointer(tmp_path / "home", state, keep=None, every=10**6) as ckpt:
        yield Averaged(tmp_path / "home", ckpt, gate, model, optimizer, average)


def run(averaged: Averaged, saves: int, *, between: Callable[[], object] = lambda: None) -> list[bool]:
    """Save, then call `between` and train a step, several times; return whether the average was calm."""
    found = []
    for _ in range(saves):
        found.append(averaged.is_calm())
        between()
        averaged.step()
    return found


def write_twice(averaged: Averaged) -> None:
    if averaged.saved in (2, 5):
        averaged.average.numpy().fill(averaged.saved)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda _: None, [False, False, True, True, True]),
        (lambda averaged: averaged.average.data.clamp_(0, 0.9), [False] * 9),
        (write_twice, [False] * 8 + [True] * 9),  # each begins the series of observations again
    ],
    ids=["never", "each time", "twice"],
)
def test_an_average_without_writes_between_save_and_step_is_copied_in_the_background_from_then_on(
    averaged: Averaged, write: Callable[[Averaged], object], expected: list[bool]
) -> None:
    """After two observations in a row, which follow the saves 1, 2, 4, 8 and 16."""
    assert run(averaged, len(expected), between=lambda: write(averaged)) == expected


@pytest.mark.parametrize("steps_others", [False, True])
def test_without_steps_of_its_optimizers_nothing_is_calm(averaged: Averaged, steps_others: bool) -> None:
    """No optimizer would wait for the copy."""
    averaged.step()
    other, found = make_training(), []
    for _ in range(6):
        found.append(averaged.is_calm())
        if steps_others:
            train(other["model"], other["optimizer"])
    assert found == [False] * 6


def test_a_write_to_a_calm_tensor_drops_one_save_and_the_tensor_is_never_calm_again(
    averaged: Averaged,
) -> None:
    assert run(averaged, 3)[-1]
    averaged.gate.opened.clear()
    torn = averaged.ckpt.save(4)
    averaged.average.data.fill_(0.5)
    averaged.gate.opened.set()
    with pytest.raises(InvalidInput, match=r"average was written while it was being copied"):
        torn.wait_durable()
    assert averaged.ckpt.should_save(5), "the save is repeated, though none is due"
    averaged.saved = 4
    with pytest.warns(SaveWarning, match="step 4 was dropped"):
        assert not averaged.is_calm()
    assert run(averaged, 30) == [False] * 30


def test_a_step_waits_for_the_copies_of_calm_tensors(averaged: Averaged) -> None:
    """The average is updated after the step, so its copy is that of the save."""
    assert run(averaged, 3)[-1]
    averaged.gate.opened.clear()
    expected = snapshot(averaged.state)
    save = averaged.ckpt.save(4)
    averaged.step()
    save.wait_durable()
    check_saved(averaged.home, 4, expected)


def call_in_child(function: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_process_does_not_end_the_observation_of_its_parent(averaged: Averaged) -> None:
    assert not averaged.is_calm()
    call_in_child(averaged.ckpt._components.pipeline.stager.calm.end)
    averaged.average.fill_(0.25)  # it is still recorded
    averaged.step()
    assert run(averaged, 3) == [False, False, False]


def test_a_child_process_does_not_wait_for_the_copy_of_its_parent(averaged: Averaged) -> None:
    averaged.gate.opened.clear()
    save = averaged.ckpt.save(1)
    call_in_child(lambda: averaged.ckpt._components.pipeline.stager._before_step(averaged.optimizer))
    averaged.gate.opened.set()
    save.wait_durable()


def test_an_average_in_a_file_is_copied_before_save_returns_while_it_has_pages_of_the_file(
    averaged: Averaged, tmp_path: Path
) -> None:
    """Another program that writes to the file would change it without a trace."""
    path = tmp_path / "average"
    path.write_bytes(averaged.average.numpy().tobytes())
    averaged.average = averaged.ckpt.state["average"] = torch.from_file(str(path), shared=False, size=SIZE)
    found = []
    for _ in range(4):
        found.append(averaged.is_calm())
        train(averaged.model, averaged.optimizer)
    assert found == [False] * 4
    averaged.average.mul_(0.5)  # its pages are now its own
    assert run(averaged, 13)[-1]


@pytest.mark.parametrize("is_view_first", [False, True])
def test_a_view_in_the_state_tears_no_save(averaged: Averaged, is_view_first: bool) -> None:
    weight = averaged.model.get_parameter("2.weight").detach()
    views = {"of_weight": weight[:100], "of_average": averaged.average[10:-10]}
    if is_view_first:
        averaged.ckpt.state.update(views)
    run(averaged, 3)
    averaged.ckpt.state.update(views)
    run(averaged, 6)


def test_two_checkpointers_of_the_same_average(averaged: Averaged, tmp_path: Path) -> None:
    """Only one of them can watch it at a time, and no save is torn."""
    with make_checkpointer(tmp_path / "other", averaged.state, keep=None) as other:
        for step in range(1, 6):
            assert not averaged.is_calm(), "each save of the other ends the observation"
            expected, save = snapshot(averaged.state), other.save(step)
            save.wait_durable()
            check_saved(tmp_path / "other", step, expected)
            averaged.step()
    assert run(averaged, 12) == [False] * 11 + [True]


def test_an_observation_that_nobody_ends_does_not_outlive_its_watcher() -> None:
    """As of a Checkpointer that was not closed; another one may watch the memory then."""
    tensor, first, second = torch.rand(SIZE), Watcher(), Watcher()
    for watcher in (first, second):
        watcher.locate([tensor], [0])
    calm = CalmTensors()
    calm.observe(first.start({0: tensor}), {0: "average"})
    assert not second.start({0: tensor}).tensors
    del calm, first, watcher
    gc.collect()
    watch = second.start({0: tensor})
    assert set(watch.tensors) == {0}
    watch.cancel()
    second.close()


def test_an_observed_tensor_that_training_releases_is_no_error() -> None:
    """The observation keeps no memory, and new memory at its place may not be watched."""
    watcher, calm, tensor = Watcher(), CalmTensors(), torch.rand(1 << 24)  # has a mapping of its own
    watcher.locate([tensor], [0])
    calm.observe(watcher.start({0: tensor}), {0: "average"})
    released = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert released() is None
    calm.end()
    assert "average" not in calm
    watcher.close()


def test_a_state_that_is_given_to_save_may_be_written_to_at_once(tmp_path: Path) -> None:
    """As the documentation of `save` promises."""
    model, average = make_model(), torch.rand(SIZE)
    optimizer = SGD(model.parameters(), lr=0.1)
    with make_checkpointer(tmp_path / "home", None, keep=None) as ckpt:
        for step in range(1, 6):
            train(model, optimizer)
            expected = {"average": average.clone()}
            save = ckpt.save(step, {"model": model, "optimizer": optimizer, "average": average})
            if step > 4:
                average.zero_()
            save.wait_durable()
            check_saved(tmp_path / "home", step, expected)


def test_memory_that_an_object_may_release_is_never_calm() -> None:
    """As that of FSDP1's parameters: their storage is resized beside training."""
    tensors = {name: torch.rand(SIZE) for name in ("owned", "plain", "released")}
    plan = make_plan(tensors, {"owned"}, temporary={"released"})
    assert [plan.names[i] for i in plan.lasting] == ["plain"]
