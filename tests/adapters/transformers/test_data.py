"""Trainers that read `GlobalBatches`: each sample once per epoch, whatever ends the process."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs torch-holdfast[transformers]")
pytest.importorskip("accelerate", reason="needs torch-holdfast[transformers]")

import holdfast
from adapters import running
from adapters.transformers.test_attach import POINTS, make
from holdfast.adapters.transformers import attach
from holdfast.train.data import GlobalBatches

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
train, train_ranks = functools.partial(running.train, SCRIPT), functools.partial(running.train_ranks, SCRIPT)
PLAN: dict[str, Any] = {"batches": 12}
STEPS_PER_EPOCH, NUM_SAMPLES = 6, 64
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning", "ignore::FutureWarning")


def steps_of(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step, of all ranks. Of a step that was done again, the last run counts."""
    found: dict[int, list[list[int]]] = {}
    for start in (folder / "samples").read_text().split("start\n"):
        lines = [[int(one) for one in line.split()] for line in start.splitlines()]
        first = min((step for step, *_ in lines), default=0)
        found = {step: rows for step, rows in found.items() if step < first or not lines}
        for step, *samples in lines:
            found.setdefault(step, []).append(samples)
    return {step: sorted(one for row in rows for one in row) for step, rows in found.items()}


def check_epochs(steps: dict[int, list[int]], num_steps: int) -> None:
    """Check that each complete epoch has each sample once."""
    assert sorted(steps) == list(range(num_steps))
    for first in range(0, num_steps - STEPS_PER_EPOCH + 1, STEPS_PER_EPOCH):
        counts = Counter(one for step in range(first, first + STEPS_PER_EPOCH) for one in steps[step])
        assert counts == dict.fromkeys(range(NUM_SAMPLES), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_accumulation_steps": 3}, {"dataloader_num_workers": 2}],
    ids=["plain", "accumulation", "workers"],
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, arguments: dict[str, Any]) -> None:
    plan = {**PLAN, "arguments": arguments}
    unbroken = train(tmp_path / "unbroken", **plan)
    for step in (4, 9, 15):
        train(tmp_path / "out", status=-9, kill_at=step, resume="auto", **plan)
    assert train(tmp_path / "out", resume=True, **plan) == unbroken
    assert steps_of(tmp_path / "out") == steps_of(tmp_path / "unbroken")
    check_epochs(steps_of(tmp_path / "out"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("step", [9, 12], ids=["mid-epoch", "end of an epoch"])
def test_a_preempted_run_resumes_bit_for_bit(tmp_path: Path, step: int) -> None:
    unbroken = train(tmp_path / "unbroken", **PLAN)
    train(tmp_path / "out", status=75, kill_at=step, signal=15, **PLAN)
    assert train(tmp_path / "out", resume=True, **PLAN) == unbroken
    check_epochs(steps_of(tmp_path / "out"), 20)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulation"])
def test_each_sample_is_used_once_on_another_number_of_ranks(
    tmp_path: Path, before: int, after: int, arguments: dict[str, Any]
) -> None:
    plan = {**PLAN, "arguments": arguments}
    unbroken = train(tmp_path / "unbroken", **plan)
    assert unbroken["state"][0] == 20
    kills = {"statuses": [-9] + [0] * (before - 1), "kill_at": 10}
    train_ranks(tmp_path / "out", before, **kills, **plan)
    kills = {"statuses": [75] * after, "kill_at": 14, "signal": 15}
    train_ranks(tmp_path / "out", after, resume=True, **kills, **plan)
    train_ranks(tmp_path / "out", before, resume=True, **plan)
    steps = steps_of(tmp_path / "out")
    check_epochs(steps, 20)
    assert steps == steps_of(tmp_path / "unbroken")


def test_the_position_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    data = GlobalBatches(len(POINTS), 4)
    attach(make(tmp_path, max_steps=6), data=data).train()
    assert data.position == 24
    assert data.epoch == 1
    again = GlobalBatches(len(POINTS), 4)
    attach(make(tmp_path, max_steps=7), data=again).train(resume_from_checkpoint=True)
    assert again.position == 28


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ({"rank": 0, "world_size": 2}, {}, "rank 0 of 2, and this is rank 0 of 1"),
        ({"accumulation_steps": 2}, {}, "gradient_accumulation_steps=1"),
        ({"num_samples": 17}, {}, "train_dataset has 16"),
        ({}, {"ignore_data_skip": True}, "ignore_data_skip"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    data = GlobalBatches(**{"num_samples": len(POINTS), "batch_size": 4, **options})
    trainer = make(tmp_path, **changes)
    with pytest.raises(holdfast.InvalidInput, match=expected):
        attach(trainer, data=data)
    attach(make(tmp_path))  # nothing was changed


def test_another_order_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    attach(make(tmp_path, max_steps=6), data=GlobalBatches(len(POINTS), 4)).train()
    with pytest.raises(holdfast.InvalidInput, match="batch_size was 4, is 8"):
        attach(make(tmp_path), data=GlobalBatches(len(POINTS), 8)).train(resume_from_checkpoint=True)


def test_a_run_without_a_position_is_not_resumed_with_data(tmp_path: Path) -> None:
    attach(make(tmp_path / "home", max_steps=6)).train()
    with pytest.raises(holdfast.InvalidInput, match="data"):
        attach(make(tmp_path / "home"), data=GlobalBatches(len(POINTS), 4)).train(resume_from_checkpoint=True)
    make(tmp_path / "stock", max_steps=6).train()
    with pytest.raises(holdfast.InvalidInput, match="without a position in the data"):
        attach(make(tmp_path / "stock"), data=GlobalBatches(len(POINTS), 4)).train(
            resume_from_checkpoint=True
        )
