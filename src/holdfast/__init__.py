"""Holdfast keeps a PyTorch training run going.

It saves without stopping the training, proves every checkpoint, and brings the run back after a crash or a
preemption from the newest checkpoint that verifies.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from holdfast.system.stubs import read_stub

__version__ = "0.1.0"
_PLACES = read_stub(__file__)
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import holdfast` stays light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if sys.platform == "win32" and _PLACES[name] != "holdfast.errors":
        importlib.import_module("holdfast.system.environment").require_linux(name)
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, which is what completion offers."""
    return __all__
