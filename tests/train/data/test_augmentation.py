"""Random augmentation in a loader is the same in a killed and resumed run, with any number of workers."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
import nursery
from holdfast.train.data import GlobalBatches
from stage.training import make_checkpointer

SCRIPT = Path(__file__).parent / "scripts" / "augment.py"


def train(home: Path, workers: int, *words: str) -> int:
    done = nursery.shared().run([str(SCRIPT), str(home), "--workers", str(workers), *words])
    assert "Warning" not in done.stdout
    return done.returncode


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param(2, 4, (), marks=[pytest.mark.slow, pytest.mark.essential]),
        pytest.param(0, 0, (), marks=pytest.mark.slow),
        pytest.param(2, 2, (), marks=pytest.mark.slow),
        pytest.param(2, 2, ("--persistent",), marks=pytest.mark.slow),
        pytest.param(4, 2, ("--persistent",), marks=pytest.mark.slow),
        pytest.param(4, 4, (), marks=pytest.mark.slow),
    ],
)
def test_augmentation_resumes_exactly(
    before: int, after: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Killed in the middle of the second epoch, between two saves."""
    assert train(tmp_path / "whole", before, *words) == 0
    assert train(tmp_path / "killed", before, *words, "--kill-after", "9") == -signal.SIGKILL
    assert train(tmp_path / "killed", after, *words) == 0
    whole, resumed = (holdfast.open(tmp_path / name, 14).state_dict() for name in ("whole", "killed"))
    assert whole.keys() == resumed.keys()
    differing = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    assert differing == []


class OwnGenerator(Dataset[torch.Tensor]):
    """Data set with a generator of its own, of which each worker has a copy."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.rng.random())


def test_a_generator_that_workers_copy_is_named(tmp_path: Path) -> None:
    batches = GlobalBatches(8, 2)
    loader = DataLoader(OwnGenerator(), batch_sampler=batches, num_workers=1, multiprocessing_context="fork")
    with make_checkpointer(tmp_path, {"batches": batches}) as ckpt:
        stream = iter(loader)
        next(stream)
        with pytest.warns(holdfast.ResumeWarning, match=r"OwnGenerator\.rng is a generator of the data set"):
            ckpt.save(1)
