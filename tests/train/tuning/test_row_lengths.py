"""Useful lengths of token rows, from masks or from the rows' ends."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.tuning.eager_watchers import useful_lengths


@given(st.lists(st.integers(1, 20), min_size=4, max_size=12), st.integers(0, 3))
def test_padded_rows_are_measured_with_any_padding_token(lengths: list[int], padding: int) -> None:
    width = 32
    tokens = torch.full((len(lengths), width), padding)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.arange(length) % 7 + 10
    assert useful_lengths([tokens], None) == (tuple(lengths), width)


def test_a_mask_takes_precedence_and_other_tensors_have_no_lengths() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert useful_lengths([torch.ones(2, 3, dtype=torch.long)], mask) == ((2, 1), 3)
    assert useful_lengths([torch.arange(40).reshape(4, 10)], None) == ((10,) * 4, 10), "without padding"
    assert useful_lengths([torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)], None) is None
