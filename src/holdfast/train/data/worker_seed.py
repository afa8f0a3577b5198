"""Random numbers of a loader's workers: each batch of units brings the seed of its place in the data."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from typing_extensions import override

Unit = TypeVar("Unit")


class SeededUnits(list[Unit]):
    """Units of a batch, which seed the generators of the worker process that receives them.

    A loader sends them to whichever worker is free. So what a data set draws for a batch depends on the
    batch, not on the number of workers, on what they have read before, or on where a run has resumed.

    Args:
        units: of the batch.
        place: text that differs for each batch of a run.
    """

    def __init__(self, units: Iterable[Unit], place: str) -> None:
        super().__init__(units)
        self._place = place

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive, (list(self), self._place)


def _receive(units: list[Unit], place: str) -> list[Unit]:
    """Return the units of a batch. In a worker, first seed torch, numpy and random for it."""
    if get_worker_info() is not None:
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little") >> 1
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    return units


def separate_from_training(loader: object, seed: int) -> None:
    """Give a loader without a generator one of its own.

    It draws a number whenever it starts, which a resumed run does once more: from the process-wide generator
    this would change all later random numbers of the model.
    """
    if type(loader) is DataLoader and loader.generator is None:
        loader.generator = torch.Generator().manual_seed(seed)
