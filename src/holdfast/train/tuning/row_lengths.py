"""Lengths of token rows without padding, from the attention mask or the rows' ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

_MIN_TAIL = 4  # equal tokens at the end of a row that count as padding


def useful_lengths(
    given: Iterable[torch.Tensor], mask: torch.Tensor | None
) -> tuple[tuple[int, ...], int] | None:
    """Return the useful length of each row of a batch, and their padded length.

    Args:
        given: the model's inputs. The first integer tensor of shape (rows, length) counts.
        mask: the model's attention mask of shape (rows, length), if it has one.

    Returns:
        None if no input looks like padded rows of tokens.
    """
    if mask is not None and mask.dim() == 2:
        return tuple(int(length) for length in (mask != 0).sum(dim=1).tolist()), mask.shape[1]
    whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
    tokens = next((one for one in given if one.dim() == 2 and one.dtype in whole and one.shape[1] > 1), None)
    if tokens is None:
        return None
    tokens = tokens.detach().cpu()
    width = tokens.shape[1]
    ends = tokens == tokens[:, -1:]
    tails = ends.flip(1).long().cumprod(dim=1).sum(dim=1)
    values = [
        int(value)
        for value, tail in zip(tokens[:, -1].tolist(), tails.tolist(), strict=True)
        if tail >= _MIN_TAIL
    ]
    if not values:
        return tuple([width] * tokens.shape[0]), width
    padding, times = Counter(values).most_common(1)[0]
    if times * 4 < tokens.shape[0]:
        return tuple([width] * tokens.shape[0]), width  # a few rows end with equal tokens by chance
    pads = tokens[:, -1] == padding
    lengths = torch.where(pads, width - tails, torch.full_like(tails, width))
    return tuple(max(1, int(length)) for length in lengths.tolist()), width
