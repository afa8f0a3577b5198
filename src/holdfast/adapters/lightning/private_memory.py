"""Memory of a Trainer's optimizers that only their steps write to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.adapters.kit.private_memory import PrivateMemory, private_memory


def memory_of_trainer(trainer: Any) -> list[PrivateMemory]:
    """Return the state of a Trainer's optimizers that may be copied beside the next batches; [] if none is.

    Weights and buffers are left out: callbacks write to them after a save, for example to exchange averaged
    ones. Optimizers that are not torch's are left out too, since others may write to their state.
    """
    module = trainer.lightning_module
    return private_memory(_state_tensors(trainer), [*module.parameters(), *module.buffers()])


def _state_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    for optimizer in trainer.optimizers:
        if type(optimizer).__module__.startswith("torch.optim."):
            for slots in optimizer.state.values():
                yield from (one for one in slots.values() if _is_plain(one))


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.device.type == "cpu" and value.is_leaf
