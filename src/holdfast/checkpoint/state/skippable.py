"""Objects of a state that feed the training: those that can skip samples, and those that only iterate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Skippable(Protocol):
    """Data that can leave ranges of samples out of their order, such as a sampler. Recognized by its members.

    Its `state_dict` and `load_state_dict` include all of these.
    """

    @property
    def position(self) -> int:
        """Samples consumed by completed optimizer steps since the beginning of the run, on all ranks."""
        ...

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """Ranges that are left out, each as its first sample and its end."""
        ...

    def skip(self, start: int, stop: int) -> None:
        """Leave samples out of the order for ever, on this rank and all others.

        If the position is one of them, it moves to `stop`. A live iterator continues there.

        Args:
            start: first position that is left out.
            stop: position after the last one.
        """
        ...


def is_skippable(value: Any) -> bool:
    """Return True if an object has the members of `Skippable`."""
    if isinstance(value, (type, torch.nn.Module, torch.Tensor)):
        return False
    return (
        callable(getattr(value, "skip", None))
        and type(getattr(value, "position", None)) is int
        and isinstance(getattr(value, "skipped", None), tuple)
    )


def is_stream(value: Any) -> bool:
    """Return True for an object with a state that is iterated: a data loader, a sampler, a data set."""
    if isinstance(value, (type, torch.nn.Module, torch.Tensor, torch.optim.Optimizer, Mapping)):
        return False
    return hasattr(type(value), "__iter__") and not hasattr(type(value), "keys")
