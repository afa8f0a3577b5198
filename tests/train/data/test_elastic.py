"""A resumed run continues with the next batch on another number of ranks."""

from __future__ import annotations

import itertools
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from adapters.running import started_ranks
from holdfast.errors import InvalidInput
from holdfast.train.data import GlobalBatches
from train.data.numbers import Numbers

NUM = 80


def read(state: Any, *, ranks: int, workers: int, steps: int | None, **options: Any) -> tuple[list[int], Any]:
    """Read global batches of 8 with the loaders of all ranks. Return the samples and the new state."""
    found = list[int]()
    after: Any = None
    for rank in range(ranks):
        batches = GlobalBatches(NUM, 8, rank=rank, world_size=ranks, **options)
        if state is not None:
            batches.load_state_dict(state)
        batches.complete_steps(0)
        loader = DataLoader(Numbers(NUM), batch_sampler=batches, num_workers=workers)
        for number, batch in enumerate(loader, 1):
            found += batch.tolist()
            batches.complete_steps(1)
            if number == steps:
                break
        assert after in (None, batches.state_dict())
        after = batches.state_dict()
    return found, after


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than cores
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "starts",
    [
        [(1, 2), (1, 8)],
        [(1, 8), (1, 2)],
        [(1, 0), (1, 6)],
        [(1, 2), (1, 0), (1, 0)],
        [(2, 0), (1, 0)],
        [(8, 0), (4, 0)],
        [(8, 0), (2, 0), (8, 0)],
        [(1, 2), (1, 2)],
    ],
    ids=[
        *("workers-2-8", "workers-8-2", "workers-0-6", "workers-2-0-0"),
        *("ranks-2-1", "ranks-8-4", "ranks-8-2-8", "same"),
    ],
)
def test_the_rest_of_an_epoch_has_the_same_samples(starts: list[tuple[int, int]], shuffle: bool) -> None:
    state, used = None, list[int]()
    for ranks, workers in starts[:-1]:
        found, state = read(state, ranks=ranks, workers=workers, steps=3, shuffle=shuffle)
        used += found
    ranks, workers = starts[-1]
    rest, state = read(state, ranks=ranks, workers=workers, steps=None, shuffle=shuffle)
    assert sorted(used + rest) == list(range(NUM))
    following, _ = read(state, ranks=1, workers=0, steps=None, shuffle=shuffle)
    assert sorted(following) == list(range(NUM))  # the next epoch is not stuck
    assert (following == list(range(NUM))) is not shuffle


@pytest.mark.parametrize("shuffle", [True, False])
def test_both_parts_of_an_interrupted_epoch_are_the_uninterrupted_one(shuffle: bool) -> None:
    full, after = read(None, ranks=1, workers=0, steps=None, shuffle=shuffle)
    first, state = read(None, ranks=1, workers=0, steps=5, shuffle=shuffle)
    rest, _ = read(state, ranks=1, workers=0, steps=None, shuffle=shuffle)
    assert first + rest == full
    following, _ = read(after, ranks=1, workers=0, steps=None, shuffle=shuffle)
    assert (following != full) is shuffle, "each epoch has an order of its own"
    assert sorted(following) == sorted(full)


def test_dropped_remainders_are_equal_for_all_divisions() -> None:
    shares = [
        [GlobalBatches(NUM, 24, drop_last=True, rank=rank, world_size=ranks) for rank in range(ranks)]
        for ranks in (1, 2, 4)
    ]
    read_by = [[list(one) for one in some] for some in shares]
    for some in read_by:
        assert {tuple(map(len, batches)) for batches in some} == {(24 // len(some),) * 3}
    samples = [sorted(place for batches in some for one in batches for place in one) for some in read_by]
    assert samples[0] == samples[1] == samples[2]
    assert len(set(samples[0])) == len(samples[0]) == 72


def test_a_changed_batch_size_is_refused_with_the_fix() -> None:
    _, state = read(None, ranks=1, workers=0, steps=2)
    with pytest.raises(InvalidInput, match="batch_size was 8, is 4"):
        GlobalBatches(NUM, 4).load_state_dict(state)


@pytest.mark.parametrize("is_first_version", [False, True])
@pytest.mark.parametrize("steps", [4, 10], ids=["in mid-epoch", "at the end of an epoch"])
def test_a_state_continues_in_its_epoch_or_with_the_next(steps: int, is_first_version: bool) -> None:
    first, state = read(None, ranks=2, workers=0, steps=steps)
    if is_first_version:
        del state["epoch_start"], state["skipped"]
    rest, _ = read(state, ranks=1, workers=0, steps=None)
    assert sorted((first if steps == 4 else []) + rest) == list(range(NUM))


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


@pytest.mark.slow
@pytest.mark.ranks
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
