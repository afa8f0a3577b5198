"""Changes of ranks and workers in mid-epoch, those of litData's `test_elastic.py`."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

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


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker")  # more than cores
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "starts",
    [[(1, 2), (1, 8)], [(1, 8), (1, 2)], [(2, 0), (1, 0)], [(8, 0), (2, 0), (8, 0)], [(1, 2), (1, 2)]],
    ids=["workers-2-8", "workers-8-2", "ranks-2-1", "ranks-8-2-8", "same"],
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


def test_dropped_remainders_are_equal_for_all_divisions() -> None:
    assert GlobalBatches(NUM, 24, drop_last=True).position == 0
    first = [len(one) for one in GlobalBatches(NUM, 24, drop_last=True, rank=0, world_size=2)]
    assert first == [12] * 3
