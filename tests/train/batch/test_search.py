"""The search finds nearly the largest size that fits, in few attempts, for any memory curve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.batch import Search


def largest_found(peak: Callable[[int], int], limit: int, **options: int) -> tuple[Search, list[int]]:
    """Return a complete search, and the sizes that it tried."""
    search, tried = Search(**options), []
    while (size := search.next()) is not None:
        tried.append(size)
        search.record(size, limit - peak(size))
        assert len(tried) < 40
    return search, tried


def true_largest(peak: Callable[[int], int], limit: int, max_size: int) -> int:
    return max((size for size in range(1, max_size + 1) if peak(size) <= limit), default=0)


@given(
    floor=st.integers(0, 10**6),
    base=st.integers(0, 10**5),
    slope=st.integers(1, 10**4),
    grain=st.sampled_from([1, 512, 20_000]),
    limit=st.integers(1, 10**7),
    start=st.integers(1, 600),
)
def test_the_result_fits_and_is_nearly_the_largest(
    floor: int, base: int, slope: int, grain: int, limit: int, start: int
) -> None:
    """Memory as in training: a floor from the optimizer, then a line, in steps of the allocator."""

    def peak(size: int) -> int:
        return -(-max(floor, base + slope * size) // grain) * grain

    truth = true_largest(peak, limit, 1000)
    search, tried = largest_found(peak, limit, max_size=1000, start=start)
    assert search.largest == truth == 0 or peak(search.largest) <= limit
    assert search.largest <= truth <= max(search.largest * 1.05, search.largest + grain // slope + 1)
    assert len(tried) == len(set(tried))
    assert len(tried) <= 25


@given(st.integers(0, 10**5), st.integers(100, 10**4), st.integers(10, 1000))
def test_if_memory_is_linear_no_size_is_tried_that_does_not_fit(base: int, slope: int, truth: int) -> None:
    limit = base + slope * truth
    search, tried = largest_found(lambda size: base + slope * size, limit, max_size=10**6)
    assert all(size <= truth for size in tried)
    assert search.largest >= truth / 1.03 - 1
    assert len(tried) <= 9


def test_a_correct_estimate_takes_one_attempt() -> None:
    search = Search(start=500, slope=10.0)
    assert search.next() == 500
    search.record(500, 9)
    assert search.next() is None
    assert search.largest == 500
    assert search.expected_free_bytes(400) == 1009


@pytest.mark.parametrize(("truth", "max_attempts"), [(450, 5), (100, 9), (1, 13)])
def test_an_estimate_that_is_too_high_is_corrected(truth: int, max_attempts: int) -> None:
    search = Search(start=500, slope=10.0)
    tried = []
    while (size := search.next()) is not None:
        tried.append(size)
        search.record(size, None if size > truth else 10 * (truth - size))
    assert truth / 1.04 <= search.largest <= truth
    assert len(tried) <= max_attempts


def test_no_size_below_the_minimum_or_above_the_maximum_is_tried() -> None:
    search, tried = largest_found(lambda size: 100 * size, 150, min_size=2, start=2)
    assert (search.largest, tried) == (0, [2])
    search, tried = largest_found(lambda size: size, 10**9, max_size=300)
    assert search.largest >= 300 / 1.03
    assert max(tried) <= 300
