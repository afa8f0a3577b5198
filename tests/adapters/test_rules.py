"""Rules of cuts, found again from the boxes: whatever the splits, the shapes and the order of the ranks."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.adapters.dcp.rules import rule_of
from holdfast.format.cuts import Box, Boxes, Cut


@st.composite
def even_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut]:
    """A shape, and a cut of it by which no box is empty, written by ranks in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    splits: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 3))):
        longer = (*splits, (draw(st.integers(0, len(shape) - 1)), draw(st.integers(2, 4))))
        count = math.prod(parts for _, parts in longer)
        boxes = Cut(longer, tuple(range(count))).boxes(shape)
        if all(box.num_items for _, box in boxes):
            splits = list(longer)
    ranks = draw(st.permutations(range(math.prod(parts for _, parts in splits))))
    return shape, Cut(tuple(splits), tuple(ranks))


@given(even_cuts())
@example(((9,), Cut(((0, 2), (0, 2), (0, 2)), tuple(range(8)))))  # its halves could be cut otherwise each
def test_an_even_cut_becomes_a_rule_with_the_same_boxes(
    case: tuple[tuple[int, ...], Cut],
) -> None:
    shape, cut = case
    rows = list(cut.boxes(shape))
    found = rule_of(shape, rows[::-1])
    assert isinstance(found, Cut)
    assert sorted(found.boxes(shape)) == sorted(rows)


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(1, 6)), min_size=1
    )
)
def test_any_boxes_stay_the_boxes_they_are(places: list[tuple[int, int, int, int]]) -> None:
    """Also those that overlap, leave gaps or reach outside: these are found later, and named."""
    rows = [(rank, Box((a, b), (c, d))) for rank, (a, b, c, d) in enumerate(places)]
    assert sorted(rule_of((6, 6), rows).boxes((6, 6))) == sorted(rows)


def test_shards_that_are_short_at_the_end_are_a_rule_without_those_that_are_empty() -> None:
    """Five rows over four ranks are 2, 2, 1 and none."""
    rows = [(rank, box) for rank, box in Cut(((0, 4),), (0, 1, 2, 3)).boxes((5, 3)) if box.num_items]
    assert rule_of((5, 3), rows) == Cut(((0, 3),), (0, 1, 2))


def test_a_whole_tensor_is_a_cut_without_splits() -> None:
    for shape in ((), (0, 3), (4,)):
        assert rule_of(shape, [(7, Box.whole(shape))]) == Cut((), (7,))


def test_parts_of_a_tensor_without_elements_are_a_rule() -> None:
    rows = [(0, Box((0, 0), (2, 0))), (1, Box((2, 0), (2, 0)))]
    assert rule_of((4, 0), rows) == Cut(((0, 2),), (0, 1))


def test_uneven_shards_are_listed() -> None:
    rows = [(0, Box((0,), (1,))), (1, Box((1,), (5,)))]
    assert rule_of((6,), rows) == Boxes(tuple(rows))


def test_a_thousand_shards_are_one_split() -> None:
    cut = Cut(((0, 1024),), tuple(range(1024)))
    assert rule_of((4096, 8), list(cut.boxes((4096, 8)))) == cut
