"""torchdata's StatefulDataLoader over GlobalBatches resumes exactly, also on another number of workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.errors import InvalidInput
from holdfast.train.data import GlobalBatches
from stage.training import make_checkpointer
from train.data.numbers import Numbers

loaders = pytest.importorskip("torchdata.stateful_dataloader")
NUM, STEPS = 40, 14

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata 0.11


def train(home: Path, *, workers: int, saves: tuple[str, ...], until: int = STEPS) -> list[list[int]]:
    """Train from where the run stopped; return the samples of each step."""
    batches, model = GlobalBatches(NUM, 6), torch.nn.Linear(1, 1)
    loader = loaders.StatefulDataLoader(
        Numbers(NUM), batch_sampler=batches, num_workers=workers, generator=torch.Generator()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = {name: {"batches": batches, "loader": loader}[name] for name in saves}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, **data}
    found = list[list[int]]()
    with make_checkpointer(home, state, every=2) as ckpt:
        stream = itertools.chain.from_iterable(loader for _ in itertools.count())
        for step in ckpt.steps(STEPS):
            found.append(next(stream).tolist())
            optimizer.step()
            if step + 1 == until:
                break
    return found


@pytest.mark.parametrize(
    ("workers", "saves"),
    [
        ((0, 0), ("batches",)),
        ((2, 2), ("batches",)),
        ((2, 0), ("batches",)),
        ((0, 0), ("loader",)),
        ((2, 2), ("batches", "loader")),
    ],
)
def test_a_resumed_run_reads_the_samples_of_an_uninterrupted_one(
    workers: tuple[int, int], saves: tuple[str, ...], tmp_path: Path
) -> None:
    full = train(tmp_path / "full", workers=workers[0], saves=saves)
    first = train(tmp_path / "home", workers=workers[0], saves=saves, until=9)
    assert first + train(tmp_path / "home", workers=workers[1], saves=saves) == full


@pytest.mark.parametrize("kind", [DataLoader, loaders.StatefulDataLoader])
def test_batches_as_a_sampler_are_refused_with_the_fix(kind: Any) -> None:
    with pytest.raises(InvalidInput, match="batch_sampler="):
        next(iter(kind(Numbers(NUM), sampler=GlobalBatches(NUM, 6), batch_size=6)))


def test_batches_as_a_sampler_without_grouping_are_whole_batches() -> None:
    data: Any = torch.arange(NUM)
    found = list(DataLoader(data, sampler=GlobalBatches(NUM, 8), batch_size=None))
    assert [len(one) for one in found] == [8] * 5
