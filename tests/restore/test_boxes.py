"""Regions as runs of bytes, against what torch does with the same region."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.cuts import Box
from holdfast.format.layout import Piece
from holdfast.restore.boxes import covering_run, is_run, item_offset, run_bytes, runs

SIDES = st.lists(
    st.integers(1, 5).flatmap(
        lambda size: st.integers(0, size - 1).flatmap(
            lambda at: st.tuples(st.just(size), st.just(at), st.integers(1, size - at))
        )
    ),
    max_size=4,
)


@given(SIDES, st.data())
def test_runs_place_every_byte_where_a_region_copy_does(
    sides: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    shape, offsets, lengths = (tuple(side[i] for side in sides) for i in range(3))
    piece = Piece("t", "I16", shape, offsets, lengths)
    values = torch.arange(1, piece.num_bytes // 2 + 1, dtype=torch.int16).reshape(lengths)
    expected = torch.zeros(shape, dtype=torch.int16)
    expected[tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))] = values
    source = values.numpy().tobytes()
    target = bytearray(expected.numel() * 2)
    cut = data.draw(st.integers(0, len(source)))
    for start, stop in ((0, cut), (cut, len(source))):
        for at, to, num_bytes in runs(piece, start, stop):
            target[to : to + num_bytes] = source[at : at + num_bytes]
    assert bytes(target) == expected.numpy().tobytes()


def test_the_length_of_a_run_reaches_over_whole_trailing_sides() -> None:
    assert run_bytes(Piece("t", "F32", (4, 5, 6), (0, 0, 0), (4, 5, 6))) == 480
    assert run_bytes(Piece("t", "F32", (4, 5, 6), (1, 0, 0), (2, 5, 6))) == 240
    assert run_bytes(Piece("t", "F32", (4, 5, 6), (1, 2, 0), (1, 2, 6))) == 48
    assert run_bytes(Piece("t", "F32", (4, 5, 6), (1, 2, 0), (2, 2, 6))) == 48
    assert run_bytes(Piece("t", "F32", (4, 5, 6), (1, 2, 3), (2, 2, 2))) == 8
    assert run_bytes(Piece("t", "F32", (), (), ())) == 4


@st.composite
def nested(draw: st.DrawFn) -> tuple[Box, Box]:
    """A box that is not empty, and one around it."""
    sides = draw(SIDES)
    outer_at = tuple(draw(st.integers(0, 3)) for _ in sides)
    inner = Box(
        tuple(at + o for (_, at, _), o in zip(sides, outer_at, strict=True)), tuple(s[2] for s in sides)
    )
    return inner, Box(outer_at, tuple(side[0] for side in sides))


def numbers(inner: Box, outer: Box) -> list[int]:
    """The number in the row-major order of `outer` of each element of `inner`, in its own order."""
    every = torch.arange(math.prod(outer.lengths)).reshape(outer.lengths)
    starts = (at - start for at, start in zip(inner.offsets, outer.offsets, strict=True))
    sides = zip(starts, inner.lengths, strict=True)
    return every[tuple(slice(at, at + length) for at, length in sides)].reshape(-1).tolist()


@given(nested())
def test_a_box_is_a_run_if_its_elements_follow_each_other(case: tuple[Box, Box]) -> None:
    inner, outer = case
    found = numbers(inner, outer)
    assert item_offset(inner, outer) == found[0]
    assert is_run(inner, outer) == (found == list(range(found[0], found[0] + len(found))))


@given(nested())
def test_the_covering_run_is_the_smallest_box_that_is_one(case: tuple[Box, Box]) -> None:
    """Of all boxes between the two that are runs."""
    inner, outer = case
    found = covering_run(inner, outer)
    assert is_run(found, outer)
    assert found.overlap(inner) == inner
    assert found.overlap(outer) == found
    options = []
    for widened in itertools.product([False, True], repeat=len(inner.lengths)):
        chosen = [(outer if wide else inner) for wide in widened]
        box = Box(
            tuple(one.offsets[dim] for dim, one in enumerate(chosen)),
            tuple(one.lengths[dim] for dim, one in enumerate(chosen)),
        )
        options += [box.num_items] if is_run(box, outer) else []
    assert found.num_items == min(options)
