"""Regions as runs of bytes, against what torch does with the same region."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.layout import Piece
from holdfast.restore.boxes import run_bytes, runs

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
