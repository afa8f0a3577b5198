"""Nebula's interface over Holdfast's checkpoints. Scripts written for Nebula only change an import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.adapters.nebula.interface import (
    Checkpoint,
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
    init,
    list_checkpoints,
)

if TYPE_CHECKING:
    from holdfast.adapters.nebula.deepspeed import use_for_deepspeed
    from holdfast.adapters.nebula.lightning import NebulaCallback, NebulaCheckpointIO

__all__ = [
    "Checkpoint",
    "NebulaCallback",
    "NebulaCheckpointIO",
    "flush_persistence",
    "get_checkpoint",
    "get_latest_checkpoint",
    "get_latest_checkpoint_path",
    "init",
    "list_checkpoints",
    "use_for_deepspeed",
]

_LAZY = {"NebulaCallback": "lightning", "NebulaCheckpointIO": "lightning", "use_for_deepspeed": "deepspeed"}


def __getattr__(name: str) -> Any:
    """Return a name that needs another library, imported on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
