"""State of a training step: collected from the user's `state`, and restored after trials."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


class TrainingState(Struct, frozen=True):
    """Everything that a training step changes, by the way it is copied and restored."""

    modules: list[nn.Module]  # outermost modules
    optimizers: list[torch.optim.Optimizer]  # optimizers
    tensors: list[torch.Tensor]  # tensors outside of modules
    generators: list[torch.Generator]  # random number generators
    stateful: list[Any]  # other objects with `state_dict` and `load_state_dict`
    others: list[str]  # type names of all other objects

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
            for part in self.parts()
        )

    @property
    def has_batch_norm(self) -> bool:
        """True if a module has batch norm, which needs several samples."""
        return any(isinstance(part, _BatchNorm) for part in self.parts())

    def reshard(self) -> None:
        """Have FSDP free the parameters that a forward pass gathered."""
        for part in self.parts():
            if isinstance(part, FSDPModule):
                part.reshard()

    def parts(self) -> Iterable[nn.Module]:
        """Return the modules and all their submodules, each once."""
        return {id(part): part for module in self.modules for part in module.modules()}.values()

    def module_tensors(self) -> Iterable[torch.Tensor]:
        """Return parameters and buffers, each once."""
        tensors = (one for module in self.modules for one in (*module.parameters(), *module.buffers()))
        return {id(tensor): tensor for tensor in tensors}.values()

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
    kinds: list[tuple[list[Any], type]] = [
        (found.modules, nn.Module),
        (found.optimizers, torch.optim.Optimizer),
        (found.tensors, torch.Tensor),
        (found.generators, torch.Generator),
    ]
    for value in _walk(state):
        known = next((values for values, kind in kinds if isinstance(value, kind)), None)
        if known is not None:
            known.append(value)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            found.stateful.append(value)
        else:
            found.others.append(type(value).__name__)
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
    if not isinstance(state, (Mapping, list, tuple)):
        yield state
        return
    for member in state.values() if isinstance(state, Mapping) else state:
        yield from _walk(member)


@contextlib.contextmanager
def restored(training: TrainingState) -> Iterator[None]:
    """Write the training state back into the same tensors after the block, bit for bit.

    The copy is in host memory, so it takes no memory of the device that is being measured.
    """
    training.reshard()
    restorers: list[Callable[[], object]] = []
    keep = restorers.append
    with torch.no_grad():
        for tensor in (*training.module_tensors(), *training.tensors):
            keep(_copier(tensor))
            if tensor.is_leaf:
                restorers += [] if tensor.grad is None else [_copier(tensor.grad)]
                keep(partial(setattr, tensor, "grad", tensor.grad))
        for part in training.parts():
            keep(partial(setattr, part, "training", part.training))
        restorers += map(_optimizer_restorer, training.optimizers)
    for generator in training.generators:
        keep(partial(generator.set_state, generator.get_state()))
    for stateful in training.stateful:
        keep(partial(stateful.load_state_dict, copy.deepcopy(stateful.state_dict())))
    keep(partial(random.setstate, random.getstate()))
    keep(partial(torch.set_rng_state, torch.get_rng_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        keep(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        keep(partial(numpy.random.set_state, numpy.random.get_state()))
    try:
        yield
    finally:
        training.reshard()
        with torch.no_grad():
            for restore in restorers:
                restore()


def _optimizer_restorer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's present groups and state."""
    groups = [
        {name: _frozen(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    states = {
        parameter: {name: _frozen(value) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }

    def restore() -> None:
        for group, was in zip(optimizer.param_groups, groups, strict=True):
            _refill(group, was, keeping="params")
        for parameter in [one for one in optimizer.state if one not in states]:
            del optimizer.state[parameter]
        for parameter, was in states.items():
            _refill(optimizer.state[parameter], was)

    return restore


def _refill(now: dict[str, Any], was: dict[str, Callable[[], Any]], *, keeping: str = "") -> None:
    """Make the members of a dict what they were, apart from one."""
    for name in now.keys() - was.keys() - {keeping}:
        del now[name]
    now.update({name: thaw() for name, thaw in was.items()})


def _copier(tensor: torch.Tensor) -> Callable[[], object]:
    """Return a function that fills `tensor` with its present contents."""
    copied = local(tensor).to("cpu", copy=True)
    return lambda: local(tensor).copy_(copied)


def _frozen(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now. A tensor stays the same object."""
    if not isinstance(value, torch.Tensor):
        copied = copy.deepcopy(value)
        return lambda: copied
    fill = _copier(value)

    def thaw() -> torch.Tensor:
        fill()
        return value

    return thaw
