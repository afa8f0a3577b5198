"""Training and measurement that all adapters and their frameworks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast import Checkpointer

WIDTH, BATCH = 1024, 32


@dataclass(frozen=True, slots=True)
class Training:
    """A training of a stack of linear layers with AdamW, saved several times.

    Args:
        folder: an empty folder for its checkpoints.
        layers: linear layers, each of 12.6 MB with its optimizer state.
        saves: number of saves.
        every: training steps from one save to the next.
    """

    folder: Path
    layers: int
    saves: int
    every: int

    @property
    def steps(self) -> int:
        """Number of training steps, with some after the last save."""
        return self.saves * self.every + self.every // 2

    @property
    def state_bytes(self) -> int:
        """Size of the model and its optimizer's state."""
        return self.layers * WIDTH * (WIDTH + 1) * 4 * 3

    def make_model(self) -> torch.nn.Sequential:
        """Return the model, equal in each process."""
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))

    def make_batch(self) -> torch.Tensor:
        """Return the batch that each step trains on."""
        return torch.ones(BATCH, WIDTH)


@dataclass(slots=True)
class Blocked:
    """Times that the saves of a training blocked it.

    Attributes:
        calls_s: seconds of each call that saves.
        waits_s: seconds for which the training waited later, until it might change what is copied.
    """

    calls_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    def timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `save` and records its time."""
        return _timed(save, self.calls_s)

    def timed_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `wait` and records its time."""
        return _timed(wait, self.waits_s)

    def watch_waits(self) -> None:
        """Record the waiting time of each Checkpointer of this process when it is closed."""
        close = Checkpointer.close

        def record_and_close(ckpt: Checkpointer, *args: Any, **kwargs: Any) -> Any:
            self.waits_s.append(ckpt.waited_for_copy_s)
            return close(ckpt, *args, **kwargs)

        Checkpointer.close = record_and_close  # type: ignore[method-assign]


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    return call


Method = Callable[[Training, Blocked], None]
"""A way of training with saves, which records what they block."""
