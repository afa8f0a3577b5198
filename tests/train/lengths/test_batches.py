"""Batches of sequences of unequal length: their order, and the cost of padding."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import InvalidInput
from holdfast.train.data.progress import EpochLayout
from holdfast.train.lengths import (
    BucketBatches,
    compare_paddings,
    first_fit,
)
from train.data.numbers import Numbers

LENGTHS = st.lists(st.integers(1, 40), min_size=16, max_size=90)


def make(lengths: list[int], batch_size: int, **options: Any) -> BucketBatches:
    return BucketBatches(lengths, batch_size, pool=3, **options)


def epochs(batches: BucketBatches, num: int) -> list[list[int]]:
    """Return all batches of the next `num` epochs."""
    return [batch for _ in range(num) for batch in batches]


def read(batches: BucketBatches, num: int) -> list[list[int]]:
    """Return the next `num` batches, of several epochs if needed."""
    return list(itertools.islice(itertools.chain.from_iterable(batches for _ in itertools.count()), num))


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Draw lengths, batch size, ranks and accumulation steps."""
    world, parts = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)]))
    return draw(LENGTHS), draw(st.integers(world * parts, 12)), world, parts


@given(settings_of())
def test_every_sample_occurs_once_per_epoch_and_all_ranks_get_as_many_batches(
    drawn: tuple[list[int], int, int, int],
) -> None:
    lengths, size, world, parts = drawn
    options = {"world_size": world, "accumulation_steps": parts}
    ranks = [epochs(make(lengths, size, rank=rank, **options), 1) for rank in range(world)]
    used = Counter(index for batches in ranks for batch in batches for index in batch)
    assert used == Counter(range(len(lengths)))
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch for batches in ranks for batch in batches)
    assert len(ranks[0]) == len(make(lengths, size, rank=0, **options))


@given(settings_of(), st.data())
def test_a_resume_at_any_batch_yields_the_remaining_batches(
    drawn: tuple[list[int], int, int, int], data: st.DataObject
) -> None:
    lengths, size, world, parts = drawn
    options = {"rank": world - 1, "world_size": world, "accumulation_steps": parts}
    whole = epochs(make(lengths, size, **options), 3)
    first = make(lengths, size, **options)
    num_before = parts * data.draw(st.integers(0, len(whole) // parts - 1))
    assert read(first, num_before) == whole[:num_before]
    second = make(lengths, size, **options)
    second.load_state_dict(first.state_dict())
    assert read(second, len(whole) - num_before) == whole[num_before:]


@given(st.lists(st.integers(1, 40), min_size=40, max_size=90), st.sampled_from([1, 2, 4]), st.data())
def test_global_batches_do_not_depend_on_the_number_of_ranks(
    lengths: list[int], world: int, data: st.DataObject
) -> None:
    """After a resume on several ranks, the steps see the same samples as without an interruption."""
    whole = epochs(make(lengths, 8, rank=0, world_size=1), 2)
    first = make(lengths, 8, rank=0, world_size=1)
    num_before = data.draw(st.integers(0, len(whole) - 1))
    assert read(first, num_before) == whole[:num_before]
    rests = []
    for rank in range(world):
        resumed = make(lengths, 8, rank=rank, world_size=world)
        resumed.load_state_dict(first.state_dict())
        rests.append(epochs(resumed, 2 - resumed.epoch))
    together = [sorted(itertools.chain(*shares)) for shares in zip(*rests, strict=True)]
    assert together == [sorted(batch) for batch in whole[num_before:]]


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 8), st.booleans())
def test_no_batch_is_too_large_and_few_are_small(n: int, size: int, min_units: int, drop_last: bool) -> None:
    min_units = min(min_units, size, n)
    layout, left, lengths = EpochLayout(size, min_units, drop_last, lambda _: n), n, list[int]()
    while (length := layout.next_size(left)) > 0:
        lengths.append(length)
        left -= length
    assert layout.num_batches(n) == len(lengths)
    if drop_last:
        assert lengths == [size] * (n // size)
        return
    assert sum(lengths) == n
    assert all(length == size for length in lengths[:-2])
    assert all(length >= min_units for length in lengths)
    if n >= size and size >= 2 * min_units:
        assert all(size // 2 <= length <= size for length in lengths)


def test_the_order_differs_by_epoch_and_seed() -> None:
    lengths = list(range(1, 65))
    batches = make(lengths, 8)
    first, second = epochs(batches, 1), epochs(batches, 1)
    assert first != second
    assert batches.epoch == 2
    assert epochs(make(lengths, 8, seed=1), 1) != first
    assert epochs(make(lengths, 8), 1) == first


def test_buckets_hold_samples_of_similar_length() -> None:
    lengths = [1 + (7919 * number) % 500 for number in range(640)]
    spread = lambda pool: sum(  # noqa: E731
        max(lengths[index] for index in batch) - min(lengths[index] for index in batch)
        for batch in BucketBatches(lengths, 16, pool=pool)
    )
    assert spread(20) < spread(0) / 8


def test_a_resume_with_other_data_is_rejected_with_the_differences() -> None:
    state = make([1, 2, 3, 4], 2).state_dict()
    with pytest.raises(InvalidInput, match=r"batch_size was 2, is 4, lengths was 4 of 10 tokens"):
        make([1, 2, 3, 5], 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"world_size": 4, "rank": 0}),
        (4, {"world_size": 2, "rank": 2}),
        (8, {}),
        (2, {"accumulation_steps": 3}),
    ],
)
def test_batches_that_cannot_be_divided_are_rejected(size: int, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"cannot be divided|do not fill one batch"):
        make([3] * 6, size, drop_last=True, **options)


def test_if_fewer_units_than_ranks_are_left_the_next_epoch_starts() -> None:
    """9 samples in batches of 4: one rank gets 4, 3, 2; after 7 of them, four ranks cannot share 2."""
    first = make([5] * 9, 4, rank=0, world_size=1)
    iterator = iter(first)
    assert len(next(iterator)) + len(next(iterator)) == 7
    second = make([5] * 9, 4, rank=0, world_size=4)
    second.load_state_dict(first.state_dict())
    assert len(next(iter(second))) == 1
    assert second.epoch == 1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_that_reads_ahead_resumes_exactly(num_workers: int) -> None:
    lengths = [1 + (7 * number) % 30 for number in range(50)]

    def loader() -> StatefulDataLoader[int]:
        return StatefulDataLoader(Numbers(50), batch_sampler=make(lengths, 8), num_workers=num_workers)

    expected = [batch.tolist() for batch in loader()]
    first = loader()
    iterator = iter(first)
    assert [next(iterator).tolist() for _ in range(3)] == expected[:3]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == expected[3:]


SOME_LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=80)


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


@given(SOME_LENGTHS, st.integers(1, 9), st.integers(1, 50), st.integers(1, 5))
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


def test_longer_sequences_count_as_truncated_and_every_method_is_listed_once() -> None:
    rows = compare_paddings([50, 2], batch_size=2, max_length=10)
    assert {row.positions for row in rows[:4]} == {20}
    assert rows[0].useful == 12 / 20
    rows = compare_paddings([5, 70, 3], batch_size=2)
    assert len({row.name for row in rows}) == len(rows) == 6
    assert (rows[0].name, rows[0].num_shapes) == ("max_length=70", 2)
    assert (rows[0].useful, rows[0].relative) == pytest.approx((78 / 210, 210 / 143))


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


@given(SOME_LENGTHS, st.integers(100, 260))
def test_first_fit_matches_its_definition(lengths: list[int], capacity: int) -> None:
    assert first_fit(lengths, capacity) == slow_first_fit(lengths, capacity)


def test_a_sequence_longer_than_a_row_is_rejected_and_none_needs_no_row() -> None:
    with pytest.raises(InvalidInput, match="12 tokens does not fit in a row of 10"):
        first_fit([3, 12], 10)
    assert first_fit([], 10) == []
