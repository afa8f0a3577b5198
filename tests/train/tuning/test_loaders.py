"""Monitored data loaders: their source lines, their batches, and changed settings for one of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from holdfast.train.lengths import BucketBatches
from holdfast.train.tuning.loaders import LoaderMonitor, LoaderSettings


def data() -> TensorDataset:
    return TensorDataset(torch.arange(12))


@pytest.fixture
def loaders() -> Iterator[LoaderMonitor]:
    watched = LoaderMonitor(LoaderSettings(1, num_workers=0, batch_size=6))
    with watched.running():
        yield watched


def test_the_last_loader_has_its_source_line(loaders: LoaderMonitor) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    made = frame.f_lineno + 1
    loader = DataLoader(data(), batch_size=4)
    assert [len(batch) for (batch,) in loader] == [4, 4, 4]
    seen = loaders.last_loader()
    assert seen is not None
    assert seen.place is not None
    assert (seen.index, seen.batch_size, seen.place.line) == (0, 4, made)
    waited_s, num_loaded = loaders.pop_waited()
    assert waited_s > 0
    assert num_loaded == 12
    assert loaders.pop_waited() == (0.0, 0)


def test_settings_change_only_the_chosen_loader(loaders: LoaderMonitor) -> None:
    first, second = DataLoader(data(), 4), DataLoader(data(), 4, True, num_workers=2, prefetch_factor=3)
    assert (first.batch_size, second.batch_size, second.num_workers) == (4, 6, 0)
    assert sorted(len(batch) for (batch,) in second) == [6, 6]


def test_the_batch_size_of_a_batch_sampler_is_found_and_changed(loaders: LoaderMonitor) -> None:
    samplers = (BucketBatches([1] * 12, 4), BatchSampler(range(12), 4, drop_last=False), [[0, 1], [2, 3, 4]])
    for sampler, sizes, size in zip(samplers, ([4, 4, 4], [6, 6], [2, 3]), (4, 6, None), strict=True):
        assert [len(batch) for (batch,) in DataLoader(data(), batch_sampler=sampler)] == sizes
        seen = loaders.last_loader()
        assert seen is not None
        assert seen.batch_size == size, "a custom sampler has none"
        assert loaders.pop_waited()[1] == (0 if size is None else 12)


def test_a_stream_is_recognized(loaders: LoaderMonitor) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    list(DataLoader(Stream(), batch_size=2))
    seen = loaders.last_loader()
    assert seen is not None
    assert seen.is_iterable
    assert seen.sample_code is not None
    assert "def __iter__" in seen.sample_code.code


def test_all_patches_are_removed_at_the_end() -> None:
    before = DataLoader.__init__, DataLoader.__iter__
    with LoaderMonitor().running():
        assert DataLoader.__init__ is not before[0]
    assert (DataLoader.__init__, DataLoader.__iter__) == before
