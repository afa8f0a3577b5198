"""Cost of padding, from lengths alone, and packing by first fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.train.lengths import compare_paddings, first_fit, format_paddings

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=80)


def test_a_case_small_enough_to_count_by_hand() -> None:
    rows = compare_paddings([1, 9, 2, 8], batch_size=2, max_length=10, multiple=4)
    assert [(row.name, row.positions, row.num_shapes) for row in rows] == [
        ("max_length=10", 40, 1),
        ("longest", 34, 2),
        ("longest, multiple of 4", 36, 2),  # 9 becomes 10, the cap; 8 stays
        ("buckets", 22, 2),
        ("buckets, multiple of 4", 28, 2),
        ("packed to 10", 20, 1),
    ]
    assert rows[0].useful == 0.5
    assert rows[0].relative == 40 / 34
    assert [row.keeps_batches for row in rows] == [True, True, True, False, False, False]


@given(LENGTHS, st.integers(1, 9), st.integers(1, 50), st.integers(1, 5))
def test_paddings_are_ordered_by_cost(lengths: list[int], size: int, multiple: int, pool: int) -> None:
    full, longest, rounded, buckets, buckets_rounded, packed = compare_paddings(
        lengths, batch_size=size, multiple=multiple, pool=pool
    )
    assert sum(lengths) <= packed.positions
    assert longest.positions <= rounded.positions <= full.positions
    assert buckets.positions <= buckets_rounded.positions <= full.positions
    assert packed.positions <= full.positions
    for row in (full, longest, rounded, buckets, buckets_rounded, packed):
        assert row.useful * row.positions == pytest.approx(sum(lengths))
        assert 0 < row.useful <= 1
    if len(lengths) % size == 0:  # else the short batch is another one after sorting
        assert buckets.positions <= longest.positions
    assert rounded.num_shapes <= longest.num_shapes


def test_longer_sequences_count_as_truncated_and_the_table_lists_every_method_once() -> None:
    rows = compare_paddings([50, 2], batch_size=2, max_length=10)
    assert {row.positions for row in rows[:4]} == {20}
    assert rows[0].useful == 12 / 20
    lines = format_paddings(compare_paddings([5, 70, 3], batch_size=2)).splitlines()
    assert len(lines) == 7
    assert lines[1].split() == ["max_length=70", "37%", "2", "1.47x"]


@pytest.mark.parametrize(("lengths", "size"), [([], 2), ([0, 1], 2), ([1], 0)])
def test_empty_lengths_and_sizes_below_one_are_rejected(lengths: list[int], size: int) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        compare_paddings(lengths, batch_size=size)


def slow_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack by first fit, by its definition."""
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        for row in rows:
            if sum(lengths[other] for other in row) + length <= capacity:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


@given(LENGTHS, st.integers(100, 260))
def test_first_fit_matches_its_definition(lengths: list[int], capacity: int) -> None:
    assert first_fit(lengths, capacity) == slow_first_fit(lengths, capacity)


def test_a_sequence_longer_than_a_row_is_rejected_and_none_needs_no_row() -> None:
    with pytest.raises(InvalidInput, match="12 tokens does not fit in a row of 10"):
        first_fit([3, 12], 10)
    assert first_fit([], 10) == []
