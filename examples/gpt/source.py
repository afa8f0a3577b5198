"""Training data of the GPT: functions and classes of Python's standard library, as bytes."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import torch

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
