"""Training data of the GPT: functions and classes of Python's standard library, as bytes in full rows."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.train.lengths import first_fit

BEGIN = 256
"""First token of each sequence; the others are its bytes."""
VOCABULARY = 257
_BORDER = re.compile(rb"^(?=(?:    )?(?:@|def |async def |class ))", re.MULTILINE)


def split_source(text: bytes, max_tokens: int) -> list[torch.Tensor]:
    """Split a module's source before each function and class, and where a sequence would be too long.

    Args:
        text: the source.
        max_tokens: maximum length of a sequence, with its first token.

    Returns:
        Tensors of tokens, each (2 to max_tokens,) int64; together they have every byte once, in order.
    """
    found = []
    for stretch in _BORDER.split(text):
        for start in range(0, len(stretch), max_tokens - 1):
            part = stretch[start : start + max_tokens - 1]
            found.append(torch.tensor([BEGIN, *part], dtype=torch.int64))
    return found


def library(max_tokens: int, max_bytes: int, folder: Path | None = None) -> list[torch.Tensor]:
    """Return sequences of Python's standard library, equal on every machine with this version of Python.

    Args:
        max_tokens: maximum length of a sequence.
        max_bytes: maximum bytes of source.
        folder: folder of the modules; by default this Python's own.
    """
    found, left = [], max_bytes
    for path in sorted((folder or Path(sysconfig.get_path("stdlib"))).glob("*.py")):
        text = path.read_bytes()[:left]
        left -= len(text)
        found += split_source(text, max_tokens)
    return found


def pack(sequences: Sequence[torch.Tensor], length: int) -> list[dict[str, torch.Tensor]]:
    """Return rows that have every sequence once, each in the first row with room."""
    rows = first_fit([len(one) for one in sequences], length)
    return [join([sequences[index] for index in row], length) for row in rows]


def join(sequences: Sequence[torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Join sequences into one row, and fill the rest with padding.

    Returns:
        Tensors of shape (length,) int64: `input_ids`; `position_ids`, from 0 in each sequence;
        `sequence_ids`, 0, 1, ..., and -1 for padding.
    """
    padding = torch.zeros(length - sum(map(len, sequences)), dtype=torch.int64)
    parts = [*sequences, padding]
    ids = torch.tensor([*range(len(sequences)), -1])
    return {
        "input_ids": torch.cat(parts),
        "position_ids": torch.cat([torch.arange(len(part)) for part in parts]),
        "sequence_ids": ids.repeat_interleave(torch.tensor([len(part) for part in parts])),
    }
