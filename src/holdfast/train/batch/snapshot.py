"""Copy of everything that a training step changes, in host memory, and its restoration."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch

from holdfast.train.batch.training_state import TrainingState, local


@final
class Snapshot:
    """Copy of the training state. `restore` writes it back into the same tensors, bit for bit.

    The copy is in host memory, so it takes no memory of the device that is being measured.

    Args:
        training: the state to copy. The generators of python, numpy and torch are always copied too.
    """

    def __init__(self, training: TrainingState) -> None:
        self._restorers: list[Callable[[], object]] = []
        with torch.no_grad():
            for tensor in (*training.module_tensors(), *training.tensors):
                self._keep_tensor(tensor)
            for module in training.modules:
                for part in module.modules():
                    self._keep(partial(setattr, part, "training", part.training))
            for optimizer in training.optimizers:
                self._keep_optimizer(optimizer)
        for generator in training.generators:
            self._keep(partial(generator.set_state, generator.get_state()))
        for stateful in training.stateful:
            self._keep(partial(stateful.load_state_dict, copy.deepcopy(stateful.state_dict())))
        self._keep_random_numbers()

    def restore(self) -> None:
        """Restore everything."""
        with torch.no_grad():
            for restore in self._restorers:
                restore()

    def _keep(self, restore: Callable[[], object]) -> None:
        self._restorers.append(restore)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        self._keep(_copier(tensor))
        if not tensor.is_leaf:
            return
        if tensor.grad is not None:
            self._keep(_copier(tensor.grad))
        self._keep(partial(setattr, tensor, "grad", tensor.grad))

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [
            {name: _frozen(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        states = {
            parameter: {name: _frozen(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }

        def restore_optimizer() -> None:
            for group, was in zip(optimizer.param_groups, groups, strict=True):
                for name in [name for name in group if name != "params" and name not in was]:
                    del group[name]
                group.update({name: thaw() for name, thaw in was.items()})
            for parameter in [one for one in optimizer.state if one not in states]:
                del optimizer.state[parameter]
            for parameter, was in states.items():
                state = optimizer.state[parameter]
                for name in [name for name in state if name not in was]:
                    del state[name]
                state.update({name: thaw() for name, thaw in was.items()})

        self._keep(restore_optimizer)

    def _keep_random_numbers(self) -> None:
        self._keep(partial(random.setstate, random.getstate()))
        self._keep(partial(torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._keep(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            self._keep(partial(numpy.random.set_state, numpy.random.get_state()))


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
