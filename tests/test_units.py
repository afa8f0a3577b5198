"""Sizes and durations as people write them, and names divided by their sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidInput
from holdfast.system.units import divide, format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 << 30), ("8GB", 8_000_000_000), ("512 MiB", 512 << 20), ("7", 7), (9, 9), ("1.5k", 1500)],
)
def test_sizes_are_read(text: str | int, num_bytes: int):
    assert parse_bytes(text, "memory") == num_bytes


@pytest.mark.parametrize("value", ["", "many", -1, 0, True, "8 GiBs", 1.5])
def test_bad_sizes_are_refused_by_name(value: object):
    with pytest.raises(InvalidInput, match="memory must be a size"):
        parse_bytes(value, "memory")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600.0), ("250ms", 0.25), ("2h", 7200.0), ("1d", 86400.0), (3, 3.0)]
)
def test_durations_are_read(text: str | float, seconds: float):
    assert parse_duration(text, "every") == seconds


def test_quantities_are_said_for_people():
    sizes = {0: "0 B", 999: "999 B", 1500: "1.5 kB", 123_000_000: "123 MB", 1_500_000_000: "1.5 GB"}
    assert {n: format_bytes(n) for n in sizes} == sizes
    durations = {0.0012: "1.2 ms", 3.44: "3.4 s", 320: "5 min 20 s", 7500: "2 h 5 min", 100_000: "1 d 3 h"}
    assert {s: format_duration(s) for s in durations} == durations


@given(st.lists(st.integers(0, 30)), st.integers(1, 20))
def test_groups_have_every_name_once_and_are_not_too_large(sizes: list[int], limit: int):
    names = [(str(i), size) for i, size in enumerate(sizes)]
    groups = divide(names, limit)
    assert [name for group in groups for name in group] == [name for name, _ in names]
    for group in groups:
        assert group
        assert len(group) == 1 or sum(sizes[int(name)] for name in group) <= limit
