"""Jobs: task files, the pure state machine of a job, the engines that run it, and their Python interface."""

from __future__ import annotations

import importlib
from typing import Any

from holdfast.system.stubs import read_stub

_PLACES = read_stub(__file__)
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: agents and controllers need only their own modules."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'holdfast.jobs' has no attribute {name!r}")
