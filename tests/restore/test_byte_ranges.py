"""Contiguous byte ranges of regions, compared with torch's copy of the same region."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.layout import (
    Region,
    Shard,
    byte_ranges,
    contiguous_cover,
    is_contiguous,
    item_offset,
    range_bytes,
)

SIDES = st.lists(
    st.integers(1, 5).flatmap(
        lambda size: st.integers(0, size - 1).flatmap(
            lambda at: st.tuples(st.just(size), st.just(at), st.integers(1, size - at))
        )
    ),
    max_size=4,
)


@given(SIDES, st.data())
def test_byte_ranges_equal_a_copy_of_the_region(
    sides: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    shape, offsets, sizes = (tuple(side[i] for side in sides) for i in range(3))
    shard = Shard("t", "I16", shape, offsets, sizes)
    values = torch.arange(1, shard.num_bytes // 2 + 1, dtype=torch.int16).reshape(sizes)
    expected = torch.zeros(shape, dtype=torch.int16)
    expected[shard.region.slices] = values
    source = values.numpy().tobytes()
    target = bytearray(expected.numel() * 2)
    middle = data.draw(st.integers(0, len(source)))
    for start, stop in ((0, middle), (middle, len(source))):
        for at, to, num_bytes in byte_ranges(shard, start, stop):
            target[to : to + num_bytes] = source[at : at + num_bytes]
    assert bytes(target) == expected.numpy().tobytes()


def test_a_byte_range_spans_all_whole_trailing_dimensions() -> None:
    assert range_bytes(Shard("t", "F32", (4, 5, 6), (0, 0, 0), (4, 5, 6))) == 480
    assert range_bytes(Shard("t", "F32", (4, 5, 6), (1, 0, 0), (2, 5, 6))) == 240
    assert range_bytes(Shard("t", "F32", (4, 5, 6), (1, 2, 0), (1, 2, 6))) == 48
    assert range_bytes(Shard("t", "F32", (4, 5, 6), (1, 2, 0), (2, 2, 6))) == 48
    assert range_bytes(Shard("t", "F32", (4, 5, 6), (1, 2, 3), (2, 2, 2))) == 8
    assert range_bytes(Shard("t", "F32", (), (), ())) == 4


@st.composite
def nested(draw: st.DrawFn) -> tuple[Region, Region]:
    """A region that is not empty, and one around it."""
    sides = draw(SIDES)
    outer_at = tuple(draw(st.integers(0, 3)) for _ in sides)
    inner = Region(
        tuple(at + o for (_, at, _), o in zip(sides, outer_at, strict=True)), tuple(s[2] for s in sides)
    )
    return inner, Region(outer_at, tuple(side[0] for side in sides))


def numbers(inner: Region, outer: Region) -> list[int]:
    """The number in the row-major order of `outer` of each element of `inner`, in its own order."""
    every = torch.arange(math.prod(outer.sizes)).reshape(outer.sizes)
    starts = tuple(at - start for at, start in zip(inner.offsets, outer.offsets, strict=True))
    return every[Region(starts, inner.sizes).slices].reshape(-1).tolist()


@given(nested())
def test_a_region_is_contiguous_if_its_elements_are_consecutive(case: tuple[Region, Region]) -> None:
    inner, outer = case
    found = numbers(inner, outer)
    assert item_offset(inner, outer) == found[0]
    assert is_contiguous(inner, outer) == (found == list(range(found[0], found[0] + len(found))))


@given(nested())
def test_the_contiguous_cover_is_the_smallest_one(case: tuple[Region, Region]) -> None:
    """Of all contiguous regions between the two."""
    inner, outer = case
    found = contiguous_cover(inner, outer)
    assert is_contiguous(found, outer)
    assert found.overlap(inner) == inner
    assert found.overlap(outer) == found
    options = []
    for widened in itertools.product([False, True], repeat=len(inner.sizes)):
        chosen = [(outer if wide else inner) for wide in widened]
        region = Region(
            tuple(one.offsets[dim] for dim, one in enumerate(chosen)),
            tuple(one.sizes[dim] for dim, one in enumerate(chosen)),
        )
        options += [region.num_items] if is_contiguous(region, outer) else []
    assert found.num_items == min(options)
