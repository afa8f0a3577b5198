"""Epochs whose units are arranged all at once, and kept while they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Unit = TypeVar("Unit")


class ArrangedEpochs(Generic[Unit]):
    """Units of epochs in order. The newest two are kept, since arranging them sorts all lengths.

    Args:
        seed: random seed of the order.
        arrange: returns all units of an epoch, in an order that a generator decides.
    """

    def __init__(self, seed: int, arrange: Callable[[torch.Generator], list[Unit]]) -> None:
        self._seed, self._arrange = seed, arrange
        self._kept: dict[int, list[Unit]] = {}

    def units(self, epoch: int) -> list[Unit]:
        """Return the units of an epoch, in order."""
        if epoch not in self._kept:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            while len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch] = self._arrange(generator)
        return self._kept[epoch]
