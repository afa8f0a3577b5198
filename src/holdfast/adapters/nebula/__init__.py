"""Nebula's interface over Holdfast's checkpoints, so that scripts written for it run with another import."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.adapters.nebula.current import init
from holdfast.adapters.nebula.handle import Checkpoint
from holdfast.adapters.nebula.interface import (
    flush_persistence,
    get_checkpoint,
    get_latest_checkpoint,
    get_latest_checkpoint_path,
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

_LATER = {"NebulaCallback": "lightning", "NebulaCheckpointIO": "lightning", "use_for_deepspeed": "deepspeed"}


def __getattr__(name: str) -> Any:
    """What needs another library, imported when it is first asked for."""
    if name not in _LATER:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
