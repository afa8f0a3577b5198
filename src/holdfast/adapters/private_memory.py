"""Memory that nothing but the steps of a trainer's optimizer writes to."""

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


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
