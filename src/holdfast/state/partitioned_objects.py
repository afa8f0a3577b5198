"""Objects of DeepSpeed, whose state dicts contain only the partitions of one rank."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import Unsupported

_PACKAGE = "deepspeed."
_CLASSES = {"DeepSpeedEngine": "an engine", "DeepSpeedOptimizer": "an optimizer"}


def check_not_partitioned(key: str, value: Any) -> None:
    """Check that DeepSpeed does not partition an object.

    Raises:
        Unsupported: it is an engine or an optimizer of DeepSpeed, or a module whose parameters are
            partitioned.
    """
    kind = _kind_of(value)
    if kind is not None:
        raise Unsupported(
            f"{key} is {kind} of DeepSpeed, which keeps its state in partitions of each rank, and a "
            "Checkpointer would save only a part of it. Nothing was written. Call attach(engine, home) of "
            "holdfast.adapters.deepspeed, and then engine.save_checkpoint(): it saves through Holdfast.",
            key=key,
        )


def _kind_of(value: Any) -> str | None:
    for base in type(value).__mro__:
        if base.__module__.startswith(_PACKAGE) and base.__name__ in _CLASSES:
            return _CLASSES[base.__name__]
    if isinstance(value, torch.nn.Module) and any(hasattr(one, "ds_id") for one in value.parameters()):
        return "a module under ZeRO 3"
    return None
