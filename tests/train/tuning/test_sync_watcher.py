"""Watchers at work: the lines that make the host wait, and changed data loaders."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from holdfast.train.lengths import BucketBatches
from holdfast.train.tuning.loaders import LoaderMonitor, LoaderSettings
from train.tuning.in_process import profile_step


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def find_syncs(after: Callable[[Any, Any, Any], object]) -> set[tuple[str, int]]:
    """Return kinds and lines found in a step that ends with `after(model, batch, loss)`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(
        [{"params": []}, {"params": list(model.parameters())}]
    )  # a group may be empty

    def step(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after(model, batch, loss)

    report = profile_step(step, [torch.randn(4, 8)] * 3, num_steps=5)
    return {(one.seen.split(" in ")[0], one.place.line) for one in report.findings if one.place}


def every_kind(model: nn.Sequential, batch: torch.Tensor, loss: torch.Tensor) -> None:
    weight, value = next(model.parameters()).detach(), loss.detach()
    value.item()  # .item()
    float(value)  # float()
    int(value)  # int()
    bool(value > 100)  # bool()
    f"{value:.3f}"  # print()
    repr(value)  # print()
    weight.tolist()  # .tolist()
    value.numpy()  # .numpy()
    weight.cpu()  # .cpu()
    (weight > 0).nonzero()  # .nonzero()
    torch.where(weight > 0)  # .nonzero()
    weight[weight > 0]  # x[mask]
    weight.masked_select(weight > 0)  # .masked_select()
    weight.unique()  # .unique()
    torch.equal(weight, weight)  # .equal()
    [None][torch.zeros((), dtype=torch.long) * value.long()]  # int()


def no_kind(model: nn.Sequential, batch: torch.Tensor, loss: torch.Tensor) -> None:
    weight = next(model.parameters()).detach().clone()
    weight[weight > 0] = 0.0
    weight[:2]
    torch.where(weight > 0, weight, 0.0)
    len(weight)
    max(weight.shape[0], 2)
    str(weight.dtype)
    torch.arange(4).tolist()


def test_every_kind_is_found_on_its_line() -> None:
    lines, first = inspect.getsourcelines(every_kind)
    wanted = {
        (found[1], first + number)
        for number, line in enumerate(lines)
        if (found := re.search(r"# (\S+)$", line)) is not None
    }
    assert len(wanted) == 16
    assert find_syncs(every_kind) == wanted


def test_calls_that_need_no_value_are_not_found() -> None:
    assert find_syncs(no_kind) == set()


def test_occasional_syncs_are_not_found() -> None:
    count = iter(range(1000))

    def logs(model: nn.Module, batch: torch.Tensor, loss: torch.Tensor) -> None:
        if next(count) % 10 == 0:
            loss.item()

    assert find_syncs(logs) == set()


def test_syncs_of_a_collate_function_are_not_found() -> None:
    seen = []

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        seen.append(sum(row.sum().item() for row in rows))
        return torch.stack(rows)

    def loads(model: nn.Sequential, batch: torch.Tensor, loss: torch.Tensor) -> None:
        list(DataLoader(next(model.parameters()).detach(), batch_size=4, collate_fn=collate))  # type: ignore[arg-type]

    assert find_syncs(loads) == set()
    assert seen


def data() -> TensorDataset:
    return TensorDataset(torch.arange(12))


@pytest.fixture
def loaders() -> Iterator[LoaderMonitor]:
    watched = LoaderMonitor(LoaderSettings(1, num_workers=0))
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
    assert (seen.index, seen.place.line) == (0, made)
    waited_s, num_loaded = loaders.pop_waited()
    assert waited_s > 0
    assert num_loaded == 12
    assert loaders.pop_waited() == (0.0, 0)


def test_settings_change_only_the_chosen_loader(loaders: LoaderMonitor) -> None:
    first, second = (
        DataLoader(data(), 4, num_workers=2),
        DataLoader(data(), 4, True, num_workers=2, prefetch_factor=3),
    )
    assert (first.num_workers, second.num_workers, second.prefetch_factor) == (2, 0, None)
    assert sorted(len(batch) for (batch,) in second) == [4, 4, 4]


def test_the_batch_size_of_a_batch_sampler_is_found(loaders: LoaderMonitor) -> None:
    samplers = (BucketBatches([1] * 12, 4), BatchSampler(range(12), 4, drop_last=False), [[0, 1], [2, 3, 4]])
    for sampler, sizes, size in zip(samplers, ([4, 4, 4], [4, 4, 4], [2, 3]), (4, 4, None), strict=True):
        assert [len(batch) for (batch,) in DataLoader(data(), batch_sampler=sampler)] == sizes
        assert loaders.pop_waited()[1] == (0 if size is None else 12), "a custom sampler has no batch size"


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
