"""Frames of data loaders in a stack."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType

_LOADERS = ("torch/utils/data/", "torchdata/stateful_dataloader/")
"""Folders of the code of data loaders."""


def is_loading(frames: Iterable[FrameType]) -> bool:
    """Return True if one of some nested frames is that of a data loader."""
    return any(folder in frame.f_code.co_filename for frame in frames for folder in _LOADERS)
