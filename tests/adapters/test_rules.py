"""Rules are found from the regions, for any splits, shapes and order of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.adapters.dcp.documents import find_rule
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Region


@st.composite
def even_partitionings(draw: st.DrawFn) -> tuple[tuple[int, ...], EvenPartitioning]:
    """Draw a shape and a partitioning of it without empty regions, by ranks in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    splits: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 3))):
        longer = (*splits, (draw(st.integers(0, len(shape) - 1)), draw(st.integers(2, 4))))
        count = math.prod(parts for _, parts in longer)
        regions = EvenPartitioning(longer, tuple(range(count))).regions(shape)
        if all(region.num_items for _, region in regions):
            splits = list(longer)
    ranks = draw(st.permutations(range(math.prod(parts for _, parts in splits))))
    return shape, EvenPartitioning(tuple(splits), tuple(ranks))


@given(even_partitionings())
# The halves of this one could each be split in another way.
@example(((9,), EvenPartitioning(((0, 2), (0, 2), (0, 2)), tuple(range(8)))))
def test_even_regions_become_a_rule_with_the_same_regions(
    case: tuple[tuple[int, ...], EvenPartitioning],
) -> None:
    shape, partitioning = case
    rows = list(partitioning.regions(shape))
    found = find_rule(shape, rows[::-1])
    assert isinstance(found, EvenPartitioning)
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
