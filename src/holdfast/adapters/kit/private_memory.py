"""Memory that nothing but the steps of a trainer's optimizer writes to: it is copied beside training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer


class PrivateMemory(Optimizer):
    """Stand-in for a trainer's optimizer, with the memory that no script writes to.

    `Checkpointer.save` copies the memory of optimizers beside training. Whichever optimizer has some of it
    waits for the copy in its step.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__(list(tensors), {})

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse to step: it only names memory."""
        raise AssertionError(f"a {type(self).__name__} is not an optimizer that trains")


def private_memory(owned: Iterable[torch.Tensor], shared: Iterable[torch.Tensor]) -> list[PrivateMemory]:
    """Return an optimizer's memory that may be copied beside the next steps; [] without any.

    Memory of devices is left out: writes through `.data` cannot be detected there.

    Args:
        owned: tensors that only the optimizer's step writes to.
        shared: tensors that scripts and callbacks may write to at any time, such as the weights. What shares
            their memory is left out.
    """
    addresses = {_storage_of(tensor) for tensor in shared}
    found = {id(one): one for one in owned if one.numel() and _storage_of(one) not in addresses}
    if not found or any(tensor.device.type != "cpu" for tensor in found.values()):
        return []
    return [PrivateMemory(found.values())]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
