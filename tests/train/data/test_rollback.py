"""Rollback of a training that reads its data through a DataLoader, without the samples of the spike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import holdfast
from checkpointer.skipping import feed
from holdfast.train.data import GlobalBatches
from stage.training import make_checkpointer
from train.data.numbers import Numbers

BATCH, NUM_SAMPLES = 4, 2000


class ReadTraining:
    """A training whose loss depends on its samples, which a loader reads in the order of the data."""

    def __init__(self, home: Path, bad: range, num_workers: int) -> None:
        self.home, self.bad = home, bad
        self.weight = torch.zeros(1, dtype=torch.float64)
        self.batches = GlobalBatches(NUM_SAMPLES, BATCH, shuffle=False)
        self.loader: DataLoader[Any] = DataLoader(
            Numbers(NUM_SAMPLES), batch_sampler=self.batches, num_workers=num_workers
        )
        self.seen: list[int] = []

    def _rows(self) -> Iterator[list[int]]:
        while True:
            for rows in self.loader:
                yield [int(one) for one in rows]

    def train(self, total: int, **options: Any) -> None:
        """Train to the end."""
        state = {"weight": self.weight, "data": self.batches}
        spike = holdfast.Spike("rollback", back=5)
        with make_checkpointer(self.home, state, every=10, watches=[spike], **options) as ckpt:
            rows = self._rows()
            for _ in ckpt.steps(total):
                samples = next(rows)
                self.seen += samples
                self.weight += sum(samples)
                ckpt.record(loss=feed(samples[0], bad=self.bad))

    @property
    def left_out(self) -> set[int]:
        """Samples that are left out for ever."""
        return {sample for start, stop in self.batches.skipped for sample in range(start, stop)}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_live_loader_continues_behind_the_spike_and_repeats_nothing(
    tmp_path: Path, num_workers: int
) -> None:
    training = ReadTraining(tmp_path / "home", range(400, 412), num_workers)
    training.train(150)

    assert training.batches.skipped[0][0] == 360  # behind step 90, the newest that is old enough
    assert set(training.bad) <= training.left_out
    assert len(set(training.seen)) == len(training.seen)
    trained = [sample for sample in training.seen if sample not in training.left_out]
    assert len(trained) == 150 * BATCH
    assert float(training.weight) == sum(trained)


def test_a_start_from_before_the_rollback_leaves_the_same_samples_out(tmp_path: Path) -> None:
    first = ReadTraining(tmp_path / "home", range(400, 412), 0)
    first.train(150, keep=None)

    again = ReadTraining(tmp_path / "home", first.bad, 0)
    state = {"weight": again.weight, "data": again.batches}
    with make_checkpointer(tmp_path / "home", state, every=1000) as ckpt:
        assert ckpt.restore(50) == 50
        rows = again._rows()
        for _ in ckpt.steps(150):
            again.seen += next(rows)

    assert again.batches.skipped == first.batches.skipped
    assert first.left_out.isdisjoint(again.seen)
    assert (
        again.seen == [sample for sample in range(200, 2000) if sample not in first.left_out][: 100 * BATCH]
    )
