"""Rows of several sequences as tensors: positions, borders and labels, so that none sees its neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils.data import Dataset

from holdfast.errors import InvalidInput

IGNORED = -100
"""The label that cross-entropy leaves out (torch's `ignore_index`)."""


def join_sequences(
    sequences: Sequence[Sequence[int] | torch.Tensor], row_length: int, *, pad: int = 0
) -> dict[str, torch.Tensor]:
    """One row of these sequences, one after the other, the rest padding.

    Labels are as models of `transformers` want them: not shifted, so the first token of each sequence, which
    would be predicted from its neighbour, has none.

    Returns:
        int64 tensors of shape (row_length,): `input_ids`; `labels`, with -100 where nothing is to be
        predicted; `position_ids`, from 0 in each sequence; `sequence_ids`, 0, 1, ..., and -1 for padding.

    Raises:
        InvalidInput: they are longer than the row together, or one is empty.
    """
    parts = [torch.as_tensor(one, dtype=torch.int64) for one in sequences]
    used = sum(len(part) for part in parts)
    if used > row_length or not all(map(len, parts)):
        raise InvalidInput(
            f"Sequences of {[len(part) for part in parts]} tokens do not go into a row of {row_length}: each "
            "needs at least one token, and together they must not be longer than the row."
        )
    padding = torch.full((row_length - used,), pad, dtype=torch.int64)
    counts = torch.tensor([len(part) for part in parts] + [len(padding)])
    starts = counts.cumsum(0) - counts
    ids = torch.arange(len(parts) + 1)
    ids[-1] = -1
    input_ids = torch.cat([*parts, padding])
    labels = input_ids.clone()
    labels[starts[:-1]] = IGNORED
    labels[used:] = IGNORED
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": torch.arange(row_length) - starts.repeat_interleave(counts),
        "sequence_ids": ids.repeat_interleave(counts),
    }


def attention_mask(sequence_ids: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Which position may look at which: those of its own sequence, and with `causal` none that comes later.

    Padding looks at padding, so that no row of attention is empty.

    Args:
        sequence_ids: int tensor of shape (rows, length), as of `join_sequences`.
        causal: leave out what comes later.

    Returns:
        bool tensor of shape (rows, 1, length, length), True where attention is allowed: the `attn_mask` of
        `scaled_dot_product_attention`, and a 4D `attention_mask` of models of `transformers`.
    """
    mask = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    return mask.tril() if causal else mask


def cumulative_lengths(sequence_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where sequences begin in the flattened batch, for kernels of attention over unequal lengths.

    Args:
        sequence_ids: int tensor of shape (rows, length), as of `join_sequences`.

    Returns:
        `cu_seqlens`, an int32 tensor that begins with 0 and ends with rows * length, in which each row's
        padding counts as a sequence; and the longest length.
    """
    rows, length = sequence_ids.shape
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    ends = torch.tensor([rows * length], device=starts.device)
    cumulative = torch.cat([starts, ends]).to(torch.int32)
    return cumulative, int(cumulative.diff().max())


@final
class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """A dataset whose items are rows: asked for a list of indices, it joins those sequences.

    Args:
        sequences: has each sequence's tokens at its index: a list, or a dataset.
        row_length: tokens in a row.
        pad: the token that fills it.
    """

    def __init__(self, sequences: Any, row_length: int, *, pad: int = 0) -> None:
        self._sequences, self._row_length, self._pad = sequences, row_length, pad

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return join_sequences([self._sequences[index] for index in indices], self._row_length, pad=self._pad)

    def __len__(self) -> int:
        """Sequences, not rows: how many rows they fill depends on the order."""
        return len(self._sequences)
