"""The regions of a partitioning cover a tensor exactly once, and are found without a search of all."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from format.drawing import partitions, splits
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Region, whole

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def partitionings(draw: st.DrawFn) -> tuple[EvenPartitioning, tuple[int, ...]]:
    """A partitioning, its writers in any order, and a shape that it can split."""
    shape = draw(shapes)
    chosen = draw(splits(len(shape)))
    num_regions = math.prod(parts for _, parts in chosen)
    return EvenPartitioning(chosen, tuple(draw(st.permutations(range(10, 10 + num_regions))))), shape


@st.composite
def any_region(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any region of a tensor, empty ones too."""
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Region(offsets, tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, offsets, strict=True)))


def elements(region: Region) -> set[tuple[int, ...]]:
    """The indices of all elements of a region."""
    sides = (range(at, at + length) for at, length in zip(*region, strict=True))
    return set(itertools.product(*sides))


def by_torch(shape: tuple[int, ...], chosen: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
    """The chunks of torch.chunk, split by split, with the empty ones that it leaves out."""
    shards = [torch.arange(math.prod(shape)).reshape(shape)]
    for dim, parts in chosen:
        chunked: list[torch.Tensor] = []
        for shard in shards:
            some = list(shard.chunk(parts, dim)) if shard.shape[dim] else []
            chunked += some + [shard.narrow(dim, 0, 0)] * (parts - len(some))
        shards = chunked
    return shards


@given(partitionings())
def test_regions_equal_those_of_torch_chunk(case: tuple[EvenPartitioning, tuple[int, ...]]) -> None:
    """The sizes, the elements and the order, the index of the first split varying slowest."""
    partitioning, shape = case
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    expected = by_torch(shape, partitioning.splits)
    assert len(expected) == len(partitioning.ranks)
    for index, shard in enumerate(expected):
        region = partitioning.region_at(index, shape)
        assert region.is_inside(shape)
        assert region.sizes == tuple(shard.shape)
        assert torch.equal(numbers[region.slices], shard)


@given(partitionings())
def test_each_rank_has_the_numbers_of_its_regions(case: tuple[EvenPartitioning, tuple[int, ...]]) -> None:
    partitioning, shape = case
    for rank, region in partitioning.regions(shape):
        assert [partitioning.region_at(index, shape) for index in partitioning.indices_of(rank)] == [region]
    assert partitioning.indices_of(9) == ()


@given(st.data())
def test_touching_equals_a_search_of_all_regions(data: st.DataObject) -> None:
    partitioning, shape = data.draw(partitionings())
    wanted = data.draw(any_region(shape))
    slow = [one for one in partitioning.regions(shape) if elements(one[1]) & elements(wanted)]
    assert list(partitioning.touching(wanted, shape)) == slow


@given(st.data())
def test_touching_searches_listed_regions(data: st.DataObject) -> None:
    shape, listed = data.draw(partitions())
    partitioning = ListedPartitioning(tuple(enumerate(listed)))
    wanted = data.draw(any_region(shape))
    slow = [(rank, region) for rank, region in enumerate(listed) if elements(region) & elements(wanted)]
    assert list(partitioning.touching(wanted, shape)) == slow
    assert list(partitioning.regions(shape)) == list(enumerate(listed))
    expected = [*((index,) for index in range(len(listed))), ()]
    assert [partitioning.indices_of(rank) for rank in range(len(listed) + 1)] == expected


@given(st.data())
def test_an_overlap_has_the_elements_of_both_regions(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(any_region(shape)), data.draw(any_region(shape))
    both = a.overlap(b)
    assert (elements(both) if both else set()) == elements(a) & elements(b)
    assert both == b.overlap(a)
    assert a.num_items == len(elements(a))


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0,), (5,)), ((4,), (1,)), ((-1,), (1,)), ((0,), (-1,)), ((0, 0), (1, 1)), ((0,), ())],
)
def test_a_region_outside_the_shape_is_recognized(offsets: Any, sizes: Any) -> None:
    assert not Region(offsets, sizes).is_inside((4,))
    assert Region((4,), (0,)).is_inside((4,))


def test_the_cost_of_touching_grows_only_with_its_result() -> None:
    """One row of a tensor over a thousand ranks: only its own region is made."""

    class Counted(Region):
        made = 0

        def overlap(self, other: Region) -> Region | None:
            Counted.made += 1
            return super().overlap(other)

    partitioning = EvenPartitioning(((0, 64), (1, 16)), tuple(range(1024)))
    found = list(partitioning.touching(Counted((130, 3), (1, 1)), (640, 160)))
    assert found == [(13 * 16, Region((130, 0), (10, 10)))]
    assert Counted.made == 1


def test_a_whole_tensor_has_no_splits() -> None:
    assert whole(3).region_at(0, (2, 5)) == Region((0, 0), (2, 5))
    assert (whole(3).indices_of(3), whole(3).indices_of(0)) == ((0,), ())
    assert list(whole(3).regions(())) == list(whole(3).touching(Region((), ()), ())) == [(3, Region((), ()))]
