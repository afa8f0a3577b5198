"""The text that the GPT learns: the functions and classes of Python's own library, as bytes."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch

BEGIN = 256
"""The token before each piece; the others are its bytes."""
VOCABULARY = 257
_BORDER = re.compile(rb"^(?=(?:    )?(?:@|def |async def |class ))", re.MULTILINE)


def pieces(text: bytes, max_tokens: int) -> list[torch.Tensor]:
    """A module's source, cut before each function and class, and again where a piece is too long.

    Args:
        text: the source.
        max_tokens: of a piece, its begin token included.

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
    """The pieces of Python's library, alike on every machine with this version of Python.

    Args:
        max_tokens: of a piece.
        max_bytes: how much source is read.
        folder: of the modules, if not this Python's own.
    """
    found, left = [], max_bytes
    for path in sorted((folder or Path(sysconfig.get_path("stdlib"))).glob("*.py")):
        text = path.read_bytes()[:left]
        left -= len(text)
        found += pieces(text, max_tokens)
    return found
