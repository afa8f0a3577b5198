"""Permutations that are computed per index: bijections of any length, that look random."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.data.global_batches import KeyedPermutation

SPECIAL = [1, 2, 3, 4, 5, 7, 8, 9, 97, 127, 128, 129, 1009, 4095, 4096, 4097, 65_537]


def image(length: int, key: bytes) -> list[int]:
    return KeyedPermutation(length, key)(torch.arange(length)).tolist()


def chi_squared(counts: list[int], expected: float) -> float:
    """How many standard deviations the statistic is above its mean."""
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    return (statistic - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


@given(st.one_of(st.sampled_from(SPECIAL), st.integers(1, 5000)), st.binary(max_size=20))
def test_each_number_occurs_once(length: int, key: bytes) -> None:
    assert sorted(image(length, key)) == list(range(length))


@given(st.integers(1, 2**62), st.binary(max_size=8), st.data())
def test_numbers_of_any_size_stay_below_the_length_and_differ(
    length: int, key: bytes, data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    images = KeyedPermutation(length, key)(torch.tensor(numbers)).tolist()
    assert len(set(images)) == len(numbers)
    assert all(0 <= one < length for one in images)


def test_the_order_of_this_version_is_that_of_all_versions() -> None:
    """Checkpoints depend on it: a change would repeat and leave out samples."""
    assert image(10, b"0/0") == [1, 3, 5, 6, 8, 2, 0, 4, 7, 9]
    images = KeyedPermutation(10**9, b"7/3")(torch.tensor([0, 1, 10**9 - 1])).tolist()
    assert images == [37088425, 438451775, 810947518]


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_a_few_numbers_are_equally_frequent(length: int) -> None:
    num_keys = 100 * math.factorial(length)
    counts = Counter(tuple(image(length, str(key).encode())) for key in range(num_keys))
    found = [counts[one] for one in itertools.permutations(range(length))]
    assert abs(chi_squared(found, 100)) < 5


@pytest.mark.parametrize("length", [1000, 4096, 10_007])
def test_places_and_images_are_independent(length: int) -> None:
    """Counts of (tenth of places, tenth of images), and of distances between neighbours, over 20 keys."""
    cells, steps = Counter[tuple[int, int]](), Counter[int]()
    for key in range(20):
        images = KeyedPermutation(length, str(key).encode())(torch.arange(length))
        places = torch.arange(length) * 10 // length
        cells.update(zip(places.tolist(), (images * 10 // length).tolist(), strict=True))
        steps.update(((images.diff() % length) * 16 // length).tolist())
    assert abs(chi_squared([cells[row, column] for row in range(10) for column in range(10)], length / 5)) < 6
    assert chi_squared([steps[one] for one in range(16)], 20 * (length - 1) / 16) < 6


def test_neighbouring_keys_give_unrelated_orders() -> None:
    first, second = image(5000, b"0/0"), image(5000, b"0/1")
    num_equal = sum(one == other for one, other in zip(first, second, strict=True))
    assert num_equal < 10  # one is expected
    coefficient = torch.corrcoef(torch.tensor([first, second], dtype=torch.float64))[0, 1]
    assert abs(float(coefficient)) < 0.06
