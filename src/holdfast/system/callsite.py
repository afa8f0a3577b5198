"""Frames of the stack: warnings that point at the line of the user's script, and frames of data loaders."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from types import FrameType

_PASSED_THROUGH = frozenset(
    {
        "holdfast",
        "torch",
        "contextlib",
        "functools",
        "deepspeed",
        "lightning",
        "pytorch_lightning",
        "transformers",
    }
)
"""Packages whose frames are between the user's line and ours."""
_LOADERS = ("torch/utils/data/", "torchdata/stateful_dataloader/")  # folders of the code of data loaders


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning for the innermost line outside this package and its frameworks.

    The line is found by walking the stack: a fixed `stacklevel` is wrong as soon as a function is called from
    two places. Without such a line, as in a thread of our own, the warning points at its outermost frame.
    """
    frame = _user_frame()
    facts = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=facts.get("__name__", "<unknown>"),
        registry=facts.setdefault("__warningregistry__", {}),
    )


def _user_frame() -> FrameType:
    frame = sys._getframe(2)
    while (
        frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_THROUGH and frame.f_back is not None
    ):
        frame = frame.f_back
    return frame


def is_loading(frames: Iterable[FrameType]) -> bool:
    """Return True if one of some nested frames is that of a data loader."""
    return any(folder in frame.f_code.co_filename for frame in frames for folder in _LOADERS)
