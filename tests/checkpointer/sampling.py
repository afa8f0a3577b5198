"""A sampler that can skip samples, and the batches of a small GPT with a poisoned stretch, for rollbacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class SkippingSampler:
    """The order of a stream of samples, as its position and the ranges that are left out.

    Args:
        batch: samples of all ranks in one step.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.position = 0
        self.skipped: tuple[tuple[int, int], ...] = ()

    def skip(self, start: int, stop: int) -> None:
        """Leave [start, stop) out for ever."""
        if stop <= start:
            return
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self.skipped, (start, stop)]):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        self.skipped = tuple(joined)
        self.position = self._next(self.position)

    def _next(self, position: int) -> int:
        return next((stop for start, stop in self.skipped if start <= position < stop), position)

    def take(self) -> list[int]:
        """Return the samples of the next step, and count them as consumed."""
        samples: list[int] = []
        while len(samples) < self.batch:
            self.position = self._next(self.position)
            samples.append(self.position)
            self.position += 1
        self.position = self._next(self.position)
        return samples

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.take()

    def state_dict(self) -> dict[str, Any]:
        """Return position and ranges."""
        return {"position": self.position, "skipped": [list(one) for one in self.skipped]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        self.position = state["position"]
        self.skipped = tuple((start, stop) for start, stop in state["skipped"])


VOCABULARY, LENGTH = 32, 24
"""Tokens of the small language, and of one sample."""


def draw(sample: int, poison: range) -> tuple[torch.Tensor, float]:
    """Return a sample and the weight of its loss, a function of its number.

    The language is a walk: each token is the one before plus 1, 2 or 3. In the poisoned stretch the tokens
    are noise, and the file's weights are corrupt.
    """
    generator = torch.Generator().manual_seed(sample)
    if sample in poison:
        return torch.randint(VOCABULARY, (LENGTH,), generator=generator), 1e4
    steps = 1 + torch.multinomial(
        torch.tensor([0.8, 0.15, 0.05]), LENGTH, replacement=True, generator=generator
    )
    start = int(torch.randint(VOCABULARY, (1,), generator=generator))
    return (start + steps.cumsum(0)) % VOCABULARY, 1.0
