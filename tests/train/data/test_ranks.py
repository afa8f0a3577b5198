"""Kills of real ranks with worker processes, which resume on other numbers of both."""

from __future__ import annotations

import itertools
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from adapters.running import started_ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
SCRIPT = Path(__file__).parent / "scripts" / "train.py"


def train(folder: Path, ranks: int, *, total: int, workers: int, kill_at: int = -1) -> None:
    """Train until the end, or until rank 0 kills itself."""
    log = folder / f"log-{ranks}-{kill_at}"
    with started_ranks([SCRIPT, folder / "home", log, total, workers, kill_at], ranks) as started:
        status = started.children[0].wait()
        if kill_at < 0:
            assert [one.wait() for one in started.children] == [0] * ranks, started.errors()
        else:
            assert status == -signal.SIGKILL, started.errors()


def samples_of(log: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for line in log.read_text().splitlines():
        step, *samples = map(int, line.split())
        found[step] += samples
    return found


def test_killed_ranks_resume_on_other_numbers_and_use_each_sample_once(tmp_path: Path) -> None:
    """Batches of 12 of 100 samples: 7 of 12, then two of 8; the kills are in the first and second epoch."""
    train(tmp_path, 2, total=18, workers=2, kill_at=5)
    train(tmp_path, 1, total=18, workers=0, kill_at=13)
    train(tmp_path, 3, total=18, workers=1)
    line: dict[int, list[int]] = {}
    for name in ("log-2-5", "log-1-13", "log-3--1"):
        line |= samples_of(tmp_path / name)  # steps that are done again replace those that were lost
    assert sorted(line) == list(range(18))
    for epoch in (range(9), range(9, 18)):
        used = sorted(itertools.chain.from_iterable(line[step] for step in epoch))
        assert used == list(range(100))
    assert [len(line[step]) for step in range(9)] == [12] * 7 + [8] * 2
