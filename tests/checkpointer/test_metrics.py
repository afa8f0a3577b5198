"""Recorded metrics: none that a checkpoint needs is lost, and none makes training wait or fail."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.run import metrics
from holdfast.checkpoint.run.metrics import MetricsBuffer, Number
from holdfast.checkpoint.store import open_store
from holdfast.watch.report.curves import Point
from holdfast.watch.report.summary import read_summary
from stage.training import keeper_of, make_checkpointer


class Receiver:
    """Receiver of batches, in place of a keeper."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], dict[str, list[Number]]]] = []

        self.updates: list[tuple[int, dict[str, float]]] = []

    def send_metrics(self, steps: list[int], values: Mapping[str, Sequence[Number]]) -> None:
        self.batches.append((steps, {name: list(column) for name, column in values.items()}))

    def update_metrics(self, step: int, metrics: SaveValues) -> None:
        self.updates.append((step, dict(metrics.values)))


def read_metrics(home: Path) -> list[dict[str, Any]]:
    """All lines of metrics in a home's history, as they were written."""
    lines = []
    for path in sorted((home / "history").iterdir()):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == "metrics"]


def losses(home: Path) -> tuple[Point, ...]:
    """The curve of the loss."""
    curves = read_summary(open_store(str(home))).curves
    return next(curve.counted for curve in curves if curve.name == "loss")


def test_a_late_value_follows_the_save_that_it_changes() -> None:
    """A thread copies the save. What the loop records just then must not reach the keeper before it."""
    sent, numbers = Receiver(), MetricsBuffer()
    numbers.begin_save(1)

    def record() -> None:
        numbers.add(1, {"loss": 2.0})
        numbers.flush(sent)

    recording = threading.Thread(target=record)
    with numbers.of_save(1) as submitted:
        recording.start()
        recording.join(0.1)  # it waits
        assert (submitted.values, sent.updates) == ({}, [])
    recording.join()
    assert sent.updates == [(1, {"loss": 2.0})]


def test_numbers_of_all_kinds_become_columns() -> None:
    sent, numbers = Receiver(), MetricsBuffer()
    numbers.add(1, {"loss": torch.tensor([2.5], requires_grad=True), "lr": 1, "norm": np.float32(0.5)})
    numbers.add(2, {"loss": torch.tensor(math.nan), "lr": -math.inf})
    numbers.add(2, {"lr": True})
    numbers.flush(sent)
    assert sent.batches == [([1, 2], {"loss": [2.5, "nan"], "lr": [1.0, 1.0], "norm": [0.5, None]})]


@pytest.mark.parametrize(("device", "upto"), [("cpu", None), pytest.param("cuda", 3, marks=pytest.mark.gpu)])
def test_a_number_is_recorded_as_it_is_now(device: str, upto: int | None) -> None:
    """Training may change it in place. A copy from a device is behind what is queued: only a save waits."""
    sent, numbers, total = Receiver(), MetricsBuffer(), torch.zeros((), device=device)
    for step in range(1, 4):
        total += 1
        numbers.add(step, {"total": total})
    numbers.flush(sent, upto=upto)
    assert [value for _, values in sent.batches for value in values["total"]] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "value", ["0.5", None, torch.ones(2), torch.ones((), dtype=torch.complex64), [1.0], 10**400]
)
def test_a_value_that_is_not_a_number_is_refused_by_name(value: Any) -> None:
    numbers = MetricsBuffer()
    with pytest.raises(holdfast.InvalidInput, match="accuracy"):
        numbers.add(1, {"accuracy": value})


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "\ud800"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(holdfast.InvalidInput, match="name"):
        MetricsBuffer().add(1, {name: 1.0})


def test_names_have_a_limit() -> None:
    numbers = MetricsBuffer()
    for number in range(metrics.MAX_NAMES):
        numbers.add(1, {f"n{number}": 0.0})
    with pytest.raises(holdfast.InvalidInput, match="32 names"):
        numbers.add(1, {"one too many": 0.0})


def test_batches_fit_into_a_message_whatever_they_hold() -> None:
    from holdfast.checkpoint.keeper.messages import MAX_MESSAGE_BYTES

    sent, numbers = Receiver(), MetricsBuffer()
    names = ["\U0001f41a" * 60 + f"{number:04}" for number in range(metrics.MAX_NAMES)]
    for step in range(10**8, 10**8 + 100):
        numbers.add(step, dict.fromkeys(names, -1.2345678901234567e-300))
    numbers.flush(sent)
    assert sum(len(steps) for steps, _ in sent.batches) == 100
    assert max(len(json.dumps(batch)) for batch in sent.batches) < MAX_MESSAGE_BYTES - 1000


def test_recorded_numbers_are_bounded_without_a_receiver() -> None:
    sent, numbers = Receiver(), MetricsBuffer()
    for step in range(30_000):
        numbers.add(step, {"loss": 1.0})
    numbers.flush(sent)
    steps = [step for steps, _ in sent.batches for step in steps]
    assert steps == list(range(10_000, 30_000)), "the newest stay"


def test_after_very_many_numbers_only_some_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "THIN_AFTER", 20)
    sent, numbers = Receiver(), MetricsBuffer()
    for step in range(1, 1001):
        numbers.add(step, {"loss": 1.0})
    numbers.flush(sent)
    steps = [step for steps, _ in sent.batches for step in steps]
    assert steps[:22] == [*range(1, 21), 30, 40]
    assert len(steps) < 60


def test_without_steps_the_step_can_be_named(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        ckpt.record(7, loss=0.5)
        ckpt.save(7).wait_durable()
        ckpt.record(loss=0.25)
    assert losses(tmp_path / "home") == (Point(7, 1, 0.5), Point(8, 1, 0.25))


def test_each_step_of_the_loop_is_recorded_once(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.ones(2)}
    with make_checkpointer(tmp_path / "home", state, every=4) as ckpt:
        for step in ckpt.steps(10):
            ckpt.record(loss=step + 1)
    assert losses(tmp_path / "home") == tuple(Point(step, 1, float(step)) for step in range(1, 11))
    lines = read_metrics(tmp_path / "home")
    assert [step for line in lines for step in line["steps"]] == list(range(1, 11))
    assert len(lines) < 10, "in batches"


def test_what_a_checkpoint_needs_is_written_before_it_is_complete(tmp_path: Path) -> None:
    """Read while the training still runs, as soon as the save is durable."""
    state = {"x": torch.ones(2)}
    with make_checkpointer(tmp_path / "home", state) as ckpt:
        for step in range(1, 4):
            ckpt.record(step, loss=step)
        ckpt.save(3).wait_durable()
        told = [step for line in read_metrics(tmp_path / "home") for step in line["steps"]]
        assert sorted(set(told)) == [1, 2, 3]


def test_a_killed_keeper_loses_no_number_that_a_checkpoint_needs(tmp_path: Path) -> None:
    def train() -> None:
        with make_checkpointer(tmp_path / "home", {"x": torch.ones(2)}) as ckpt:
            ckpt.save(1).wait_durable()
            keeper = keeper_of(ckpt)
            for step in range(2, 8):
                if step % 2:
                    os.kill(keeper.pid, signal.SIGSTOP)  # so that it is told, and does not write
                ckpt.record(step, loss=step)
                save = ckpt.save(step)
                save.wait_staged()
                if step % 2:
                    os.kill(keeper.pid, signal.SIGKILL)
                save.wait_durable(600)

    with pytest.warns(holdfast.SaveWarning, match="died"):
        train()
    assert [point.step for point in losses(tmp_path / "home")] == list(range(2, 8))


def test_going_back_is_recorded(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.ones(2)}
    with make_checkpointer(tmp_path / "home", state, every=2, keep=None) as ckpt:
        for step in range(1, 5):
            ckpt.record(step, loss=step)
            if ckpt.should_save(step):
                ckpt.save(step)
        ckpt.restore(step=2)
        ckpt.record(loss=30)
        ckpt.save(3)
    (curve,) = read_summary(open_store(str(tmp_path / "home"))).curves
    assert [(point.step, point.value) for point in curve.counted] == [(1, 1), (2, 2), (3, 30)]
    assert [[point.step for point in stretch] for stretch in curve.lost] == [[3, 4]]


def test_a_history_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "history").write_text("in the way")

    def train() -> None:
        with make_checkpointer(home, {"x": torch.ones(2)}) as ckpt:
            for step in range(1, 4):
                ckpt.record(step, loss=1.0)
                ckpt.save(step).wait_durable()

    with pytest.warns(holdfast.SaveWarning, match="history"):
        train()
    assert holdfast.open(home).step == 3
