"""Cut rules are found from the boxes, for any splits, shapes and order of ranks."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.adapters.dcp.rules import find_rule
from holdfast.format.cuts import Box, Boxes, Cut


@st.composite
def even_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut]:
    """Draw a shape and a cut of it without empty boxes, by ranks in any order."""
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
    found = find_rule(shape, rows[::-1])
    assert isinstance(found, Cut)
    assert sorted(found.boxes(shape)) == sorted(rows)


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(1, 6)), min_size=1
    )
)
def test_any_boxes_keep_their_positions(places: list[tuple[int, int, int, int]]) -> None:
    """This includes boxes that overlap, leave gaps or are outside, which are detected later."""
    rows = [(rank, Box((a, b), (c, d))) for rank, (a, b, c, d) in enumerate(places)]
    assert sorted(find_rule((6, 6), rows).boxes((6, 6))) == sorted(rows)


def test_short_shards_at_the_end_are_a_rule_and_empty_ones_are_omitted() -> None:
    """Five rows over four ranks are 2, 2, 1 and 0."""
    rows = [(rank, box) for rank, box in Cut(((0, 4),), (0, 1, 2, 3)).boxes((5, 3)) if box.num_items]
    assert find_rule((5, 3), rows) == Cut(((0, 3),), (0, 1, 2))


def test_a_whole_tensor_is_a_cut_without_splits() -> None:
    for shape in ((), (0, 3), (4,)):
        assert find_rule(shape, [(7, Box.whole(shape))]) == Cut((), (7,))


def test_parts_of_a_tensor_without_elements_are_a_rule() -> None:
    rows = [(0, Box((0, 0), (2, 0))), (1, Box((2, 0), (2, 0)))]
    assert find_rule((4, 0), rows) == Cut(((0, 2),), (0, 1))


def test_uneven_shards_are_listed() -> None:
    rows = [(0, Box((0,), (1,))), (1, Box((1,), (5,)))]
    assert find_rule((6,), rows) == Boxes(tuple(rows))


def test_a_thousand_shards_are_one_split() -> None:
    cut = Cut(((0, 1024),), tuple(range(1024)))
    assert find_rule((4096, 8), list(cut.boxes((4096, 8)))) == cut
