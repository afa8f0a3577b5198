"""Tensors and objects that a training step changes, collected from the user's `state`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything that a training step changes, by the way it is copied and restored.

    Attributes:
        modules: outermost modules.
        optimizers: optimizers.
        tensors: tensors outside of modules.
        generators: random number generators.
        stateful: other objects with `state_dict` and `load_state_dict`.
        others: type names of all other objects.
    """

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[torch.Tensor]
    generators: list[torch.Generator]
    stateful: list[Any]
    others: list[str]

    @property
    def devices(self) -> set[torch.device]:
        """Devices of modules and tensors. Optimizers may keep counters elsewhere."""
        return {one.device for one in (*self.module_tensors(), *self.tensors)}

    @property
    def has_collectives(self) -> bool:
        """True if a forward or backward pass communicates with other ranks."""
        return any(
            isinstance(part, DistributedDataParallel)
            or any(isinstance(one, DTensor) for one in part.parameters(recurse=False))
            for module in self.modules
            for part in module.modules()
        )

    @property
    def has_batch_norm(self) -> bool:
        """True if a module has batch norm, which needs several samples."""
        return any(isinstance(part, _BatchNorm) for module in self.modules for part in module.modules())

    def reshard(self) -> None:
        """Have FSDP free the parameters that a forward pass gathered."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def module_tensors(self) -> Iterator[torch.Tensor]:
        """Yield parameters and buffers, each once."""
        seen: set[int] = set()
        for module in self.modules:
            for one in (*module.parameters(), *module.buffers()):
                if id(one) not in seen:
                    seen.add(id(one))
                    yield one

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of every tensor that lives between two steps. Gradients do not."""
        yield from map(local, self.module_tensors())
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (local(one) for one in state.values() if isinstance(one, torch.Tensor))
        yield from self.tensors


def collect_training_state(state: Any) -> TrainingState:
    """Collect the training state from an object, or from mappings and sequences of objects."""
    found = TrainingState([], [], [], [], [], [])
    for one in _walk(state):
        if isinstance(one, nn.Module):
            found.modules.append(one)
        elif isinstance(one, torch.optim.Optimizer):
            found.optimizers.append(one)
        elif isinstance(one, torch.Tensor):
            found.tensors.append(one)
        elif isinstance(one, torch.Generator):
            found.generators.append(one)
        elif hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
            found.stateful.append(one)
        else:
            found.others.append(type(one).__name__)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, without its gradient."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def count_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes that tensors take on a device. Shared memory counts once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in tensors
        if one.device == device
    }
    return sum(storages.values())


def _walk(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for one in state.values():
            yield from _walk(one)
    elif isinstance(state, (list, tuple)):
        for one in state:
            yield from _walk(one)
    else:
        yield state
