"""The tensors and objects that a training step changes, found in what the user calls its state."""

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
class Holdings:
    """What a training step changes, sorted by what it takes to put it back.

    Attributes:
        modules: outermost modules.
        optimizers: optimizers.
        tensors: tensors that stand by themselves.
        generators: generators of random numbers.
        stateful: anything else with `state_dict` and `load_state_dict`.
        others: what is none of these, by its type's name.
    """

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[torch.Tensor]
    generators: list[torch.Generator]
    stateful: list[Any]
    others: list[str]

    @property
    def devices(self) -> set[torch.device]:
        """Devices that hold modules and tensors; optimizers may keep counters elsewhere."""
        return {one.device for one in (*self.module_tensors(), *self.tensors)}

    @property
    def has_collectives(self) -> bool:
        """True if a forward or backward pass talks to other ranks."""
        return any(
            isinstance(part, DistributedDataParallel)
            or any(isinstance(one, DTensor) for one in part.parameters(recurse=False))
            for module in self.modules
            for part in module.modules()
        )

    @property
    def normalizes_batches(self) -> bool:
        """True if a forward pass needs several samples, for it takes their mean and spread."""
        return any(isinstance(part, _BatchNorm) for module in self.modules for part in module.modules())

    def reshard(self) -> None:
        """Have FSDP put parameters that a forward pass has gathered back into their shards."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def module_tensors(self) -> Iterator[torch.Tensor]:
        """Parameters and buffers, each once."""
        seen: set[int] = set()
        for module in self.modules:
            for one in (*module.parameters(), *module.buffers()):
                if id(one) not in seen:
                    seen.add(id(one))
                    yield one

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is held between two steps, as it lies on this rank; gradients are not."""
        yield from map(local, self.module_tensors())
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (local(one) for one in state.values() if isinstance(one, torch.Tensor))
        yield from self.tensors


def find_holdings(state: Any) -> Holdings:
    """Sort what `state` holds: an object, or mappings and sequences of objects."""
    found = Holdings([], [], [], [], [], [])
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
    """The part of a tensor that this rank holds, without its gradient."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def count_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes that these tensors keep on a device; memory that several share counts once."""
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
