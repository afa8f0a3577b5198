"""Confidence intervals of differences: exact, and unmoved by one disturbed measurement."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)

from intervals import interval_of  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path.remove(BENCHMARKS)  # its files would hide folders of tests with the same name

numbers = st.integers(-1000, 1000).map(float)  # sums of whole numbers are exact
differences = st.lists(numbers, min_size=1, max_size=20)
enough = st.lists(numbers, min_size=6, max_size=20)


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.95, 0.98])
@pytest.mark.parametrize("count", [6, 7, 10])
def test_the_interval_contains_the_truth_exactly_as_often_as_it_claims(count: int, confidence: float) -> None:
    sizes = [2.0**power for power in range(count)]  # no two means are equal
    signs = itertools.product((-1.0, 1.0), repeat=count)  # all equally likely if the truth is 0
    found = [interval_of([a * b for a, b in zip(sizes, sign, strict=True)], confidence) for sign in signs]
    covering = sum(one.low <= 0 <= one.high for one in found)
    claimed = found[0].confidence
    assert covering == claimed * len(found)
    assert claimed >= min(confidence, 1 - 2 / 2**count)


def test_published_bounds_of_ten_pairs() -> None:
    # Wilcoxon's table: at 10 pairs and 5 %, rank sums of 8 or less are significant.
    differences = [float(2**power) for power in range(10)]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(differences, 2))
    found = interval_of(differences)
    assert (found.low, found.high) == (means[8], means[-9])
    assert found.confidence == pytest.approx(1 - 2 * 25 / 1024)


@given(differences)
def test_the_estimate_is_inside_and_the_interval_within_the_values(values: list[float]) -> None:
    found = interval_of(values)
    assert min(values) <= found.low <= found.estimate <= found.high <= max(values)
    assert found.num_pairs == len(values)


@given(differences, st.randoms(use_true_random=False), numbers)
def test_order_does_not_matter_and_a_shift_moves_everything(values: list[float], random, by: float) -> None:
    found, shuffled = interval_of(values), values[:]
    random.shuffle(shuffled)
    assert interval_of(shuffled) == found
    moved = interval_of([value + by for value in values])
    assert (moved.low, moved.estimate, moved.high) == (found.low + by, found.estimate + by, found.high + by)


@given(differences)
def test_swapped_measurements_give_the_mirrored_interval(values: list[float]) -> None:
    found, mirrored = interval_of(values), interval_of([-value for value in values])
    assert (mirrored.low, mirrored.estimate, mirrored.high) == (-found.high, -found.estimate, -found.low)


@given(st.lists(numbers, min_size=11, max_size=20), st.integers(1, 10**9).map(float))
def test_one_disturbed_measurement_of_any_size_is_only_one_large_value(
    values: list[float], more: float
) -> None:
    largest = 2 * max(values) - min(values)  # its mean with any other is above them all
    disturbed, large = interval_of([*values, largest + more]), interval_of([*values, largest])
    assert disturbed.high == large.high
    assert disturbed.low == large.low


@given(enough, st.sampled_from([(0.5, 0.8), (0.8, 0.95), (0.9, 0.99)]))
def test_more_confidence_needs_a_wider_interval(values: list[float], levels: tuple[float, float]) -> None:
    narrow, wide = (interval_of(values, level) for level in levels)
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_pairs_have_less_confidence_than_wanted(count: int) -> None:
    found = interval_of([float(value) for value in range(count)])
    assert (found.low, found.high) == (0.0, float(count - 1))
    assert found.confidence == 1 - 2 / 2**count < 0.95


def test_multiples_of_a_unit() -> None:
    found = interval_of([2.0, 4.0, 6.0]).divided_by(2.0)
    assert (found.low, found.estimate, found.high, found.num_pairs) == (1.0, 2.0, 3.0, 3)
