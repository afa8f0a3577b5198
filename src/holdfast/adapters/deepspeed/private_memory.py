"""Memory of an engine that only the steps of its optimizer write to."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.optim import Optimizer

from holdfast.adapters.kit.private_memory import PrivateMemory, private_memory

_WRAPPERS = frozenset({DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3})
"""Classes that write to their partitions in `step()` of the optimizer that they have, and not elsewhere.

Subclasses are left out: those of ZenFlow and SuperOffload step in another thread or process.
"""
_PLAIN = frozenset({DeepSpeedCPUAdam, FusedAdam})


def memory_of_engine(engine: Any) -> list[PrivateMemory]:
    """Return the memory of an engine that may be copied beside the next steps; [] without any.

    These are partitions in full precision and the state of the optimizer. What belongs to the module is left
    out: scripts may write to it at any time, for example to exchange averaged weights.
    """
    inner = _trained_by(engine.optimizer)
    return [] if inner is None else private_memory(_tensors_of(inner), _tensors_of_module(engine.module))


def _trained_by(optimizer: Any) -> Optimizer | None:
    """Return the optimizer of torch's interface that makes all changes; None if others may make some."""
    if type(optimizer) in _WRAPPERS:
        optimizer = None if getattr(optimizer, "zenflow", False) else optimizer.optimizer
    kind = type(optimizer)
    is_plain = kind in _PLAIN or kind.__module__.startswith("torch.optim.")
    # DeepSpeed itself updates the momentum of every optimizer with this name, during the backward pass.
    return optimizer if is_plain and "muon" not in kind.__name__.lower() else None


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    yield from optimizer.state  # under ZeRO 3 the groups are empty between two steps
    for slots in optimizer.state.values():
        yield from (one for one in slots.values() if isinstance(one, torch.Tensor))


def _tensors_of_module(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.buffers()
    for one in module.parameters():
        yield one
        partition = getattr(one, "ds_tensor", None)  # under ZeRO 3
        if partition is not None:
            yield partition
