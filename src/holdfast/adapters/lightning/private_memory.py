"""Memory of a Trainer's optimizers that only their steps write to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.adapters.private_memory import PrivateMemory, storage_of


def private_memory(trainer: Any) -> list[PrivateMemory]:
    """Return the state of a Trainer's optimizers that may be copied beside the next batches; [] if none is.

    Weights and buffers are left out: callbacks write to them after a save, for example to exchange averaged
    ones. Optimizers that are not torch's are left out too, since others may write to their state. So are
    devices, where writes through `.data` cannot be detected.
    """
    module = trainer.lightning_module
    shared = {storage_of(one) for owner in (module.parameters(), module.buffers()) for one in owner}
    found = {id(one): one for one in _state_tensors(trainer) if storage_of(one) not in shared}
    return [PrivateMemory(found.values())] if found else []


def _state_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    for optimizer in trainer.optimizers:
        if type(optimizer).__module__.startswith("torch.optim."):
            for slots in optimizer.state.values():
                yield from (one for one in slots.values() if _is_plain(one))


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.device.type == "cpu" and value.is_leaf and value.numel() > 0
