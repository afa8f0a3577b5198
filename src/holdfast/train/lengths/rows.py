"""Rows of several sequences as tensors, with positions, sequence ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils.data import Dataset

from holdfast.errors import InvalidInput

IGNORED = -100  # label that cross-entropy ignores (torch's `ignore_index`)


def join_sequences(
    sequences: Sequence[Sequence[int] | torch.Tensor], row_length: int, *, pad_token_id: int = 0
) -> dict[str, torch.Tensor]:
    """Join sequences into one row, and fill the rest with padding.

    Labels follow the convention of `transformers`: they are not shifted. The first token of each sequence has
    no label, since its neighbour would predict it.

    Returns:
        int64 tensors of shape (row_length,): `input_ids`; `labels`, with -100 where nothing is predicted;
        `position_ids`, from 0 in each sequence; `sequence_ids`, 0, 1, ..., and -1 for padding.
    """
    parts = [torch.as_tensor(one, dtype=torch.int64) for one in sequences]
    used = sum(len(part) for part in parts)
    if used > row_length or not all(map(len, parts)):
        raise InvalidInput(
            f"Sequences of {[len(part) for part in parts]} tokens do not fit in a row of {row_length}. Each "
            "needs at least one token, and together they must not be longer than the row."
        )
    padding = torch.full((row_length - used,), pad_token_id, dtype=torch.int64)
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
    """Return the mask that limits attention to each position's own sequence.

    With `causal`, later positions are masked too. Padding attends to padding, so that no row is empty.

    Args:
        sequence_ids: int tensor of shape (rows, length), as from `join_sequences`.
        causal: mask later positions.

    Returns:
        bool tensor of shape (rows, 1, length, length), True where attention is allowed: the `attn_mask` of
        `scaled_dot_product_attention`, and a 4D `attention_mask` for models of `transformers`.
    """
    mask = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    return mask.tril() if causal else mask


def cumulative_lengths(sequence_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the start of each sequence in the flattened batch, for variable-length attention kernels.

    Args:
        sequence_ids: int tensor of shape (rows, length), as from `join_sequences`.

    Returns:
        `cu_seqlens`, an int32 tensor from 0 to rows * length, in which the padding of each row counts as a
        sequence; and the longest length.
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
    """Dataset of rows: for a list of indices, it joins those sequences into one row.

    Args:
        sequences: the tokens of each sequence by index: a list or a dataset.
        row_length: tokens in a row.
        pad_token_id: token that fills the rest of a row.
    """

    def __init__(self, sequences: Any, row_length: int, *, pad_token_id: int = 0) -> None:
        self._sequences, self._row_length, self._pad_token_id = sequences, row_length, pad_token_id

    def __getitem__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        sequences = [self._sequences[index] for index in indices]
        return join_sequences(sequences, self._row_length, pad_token_id=self._pad_token_id)

    def __len__(self) -> int:
        """Return the number of sequences. The number of rows depends on their order."""
        return len(self._sequences)
