"""Regions of saved tensors: the rules that are found from them, the spans that are read, and the values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.adapters.dcp.reader import make_sinks
from holdfast.adapters.dcp.writer import find_rule
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Region, Shard
from holdfast.errors import InvalidInput


@st.composite
def even_partitionings(draw: st.DrawFn) -> tuple[tuple[int, ...], EvenPartitioning]:
    """Draw a shape and a partitioning of it without empty regions, by ranks in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    splits: list[tuple[int, int]] = []
    for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=3)):
        longer = (*splits, (dim, draw(st.integers(2, 4))))
        count = math.prod(parts for _, parts in longer)
        regions = EvenPartitioning(longer, tuple(range(count))).regions(shape)
        if all(region.num_items for _, region in regions):
            splits = list(longer)
    ranks = draw(st.permutations(range(math.prod(parts for _, parts in splits))))
    return shape, EvenPartitioning(tuple(splits), tuple(ranks))


@given(even_partitionings())
# A mesh over two dimensions, and one whose parts along a dimension are all split again.
@example(((4, 6), EvenPartitioning(((1, 3), (0, 2)), tuple(range(6)))))
@example(((8,), EvenPartitioning(((0, 2), (0, 2), (0, 2)), tuple(range(8)))))
def test_even_regions_become_a_rule_with_the_same_regions(
    case: tuple[tuple[int, ...], EvenPartitioning],
) -> None:
    shape, partitioning = case
    rows = list(partitioning.regions(shape))
    found = find_rule(shape, rows[::-1])
    split_dims = [dim for dim, _ in partitioning.splits]
    assert isinstance(found, EvenPartitioning) or len(set(split_dims)) < len(split_dims)
    assert sorted(found.regions(shape)) == sorted(rows)


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(1, 6)), min_size=1
    )
)
def test_any_regions_keep_their_positions(places: list[tuple[int, int, int, int]]) -> None:
    """This includes regions that overlap, leave gaps or are outside, which are detected later."""
    rows = [(rank, Region((a, b), (c, d))) for rank, (a, b, c, d) in enumerate(places)]
    assert sorted(find_rule((6, 6), rows).regions((6, 6))) == sorted(rows)


THOUSAND = EvenPartitioning(((0, 1024),), tuple(range(1024)))
UNEVEN = (0, Region((0,), (1,))), (1, Region((1,), (5,)))


@pytest.mark.parametrize(
    ("shape", "rows", "rule"),
    [
        # Five rows over four ranks are 2, 2, 1 and 0, and the empty ones are omitted.
        ((5, 3), [*EvenPartitioning(((0, 4),), (0, 1, 2, 3)).regions((5, 3))][:3], (((0, 3),), (0, 1, 2))),
        *((shape, [(7, Region.whole(shape))], ((), (7,))) for shape in ((), (0, 3), (4,))),
        ((4, 0), [(0, Region((0, 0), (2, 0))), (1, Region((2, 0), (2, 0)))], (((0, 2),), (0, 1))),
        ((4096, 8), list(THOUSAND.regions((4096, 8))), (THOUSAND.splits, THOUSAND.ranks)),
    ],
    ids=["short at the end", "scalar", "whole and empty", "whole", "parts without elements", "thousand"],
)
def test_the_rule_has_as_few_splits_as_possible(shape: Any, rows: Any, rule: Any) -> None:
    assert find_rule(shape, rows) == EvenPartitioning(*rule)


def test_uneven_shards_are_listed() -> None:
    assert find_rule((6,), UNEVEN) == ListedPartitioning(UNEVEN)
    halves = tuple(EvenPartitioning(((0, 3), (0, 2)), tuple(range(6))).regions((14,)))  # of 5, 5 and 4 rows
    assert find_rule((14,), halves) == ListedPartitioning(halves)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region]:
    """Draw a shape, and a non-empty region in it."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return tuple(shape), Region(tuple(offsets), tuple(sizes))


def runs(shape: tuple[int, ...], region: Region, max_gap: int) -> list[tuple[int, int]]:
    """Return the first element of each run that is read, and the one after its last."""
    shard = Shard.whole("x", "F32", shape)
    sinks = make_sinks(shard, region, torch.zeros(region.sizes), max_gap_bytes=4 * max_gap + 3)
    return [(at // 4, (at + num_bytes) // 4) for at, num_bytes, _ in sinks]


@given(regions(), st.integers(0, 60), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_the_region_is_read_into_the_target(
    drawn: tuple[tuple[int, ...], Region], max_gap: int, step: int, dtype: torch.dtype
) -> None:
    """This holds for views of any length, dense and transposed targets, and any dtype."""
    shape, region = drawn
    sizes = region.sizes
    source = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    shard = Shard.whole("x", "F32", shape)
    content = bytearray(source.contiguous().numpy().tobytes())
    for target in (
        torch.full(sizes, -1, dtype=dtype),
        torch.full(sizes[::-1], -1, dtype=dtype).permute(tuple(reversed(range(len(sizes))))),
    ):
        for at, num_bytes, sink in make_sinks(shard, region, target, max_gap_bytes=max_gap):
            for start in range(0, num_bytes, step):
                stop = min(start + step, num_bytes)
                sink(start, memoryview(content)[at + start : at + stop])
        assert torch.equal(target, source[region.slices].to(dtype))


@given(regions(), st.integers(0, 60))
def test_nothing_is_read_twice_and_large_gaps_are_skipped(
    drawn: tuple[tuple[int, ...], Region], max_gap: int
) -> None:
    shape, region = drawn
    wanted = torch.arange(math.prod(shape)).reshape(shape)[region.slices].flatten().tolist()
    stretches = sorted(runs(shape, region, max_gap))
    for (_, stop), (start, _) in itertools.pairwise(stretches):
        assert stop <= start
    read = {item for start, stop in stretches for item in range(start, stop)}
    assert read >= set(wanted)
    gaps = [b - a - 1 for a, b in itertools.pairwise(wanted)]
    along = sum(gap for gap in gaps if gap <= max_gap)
    assert len(read) <= len(wanted) + along


def test_columns_are_one_run_for_small_rows_and_several_for_large_rows() -> None:
    region = Region((1, 2), (2, 3))
    assert runs((4, 10), region, max_gap=7) == [(12, 25)]
    assert runs((4, 10), region, max_gap=6) == [(12, 15), (22, 25)]


def test_a_target_of_another_shape_is_refused() -> None:
    shard, region = Shard.whole("x", "F32", (4,)), Region((0,), (2,))
    with pytest.raises(InvalidInput, match=r"x has shape \[2\], but the tensor to load it into has \[3\]"):
        next(make_sinks(shard, region, torch.zeros(3), max_gap_bytes=0))
