"""A training whose loss depends on its samples alone, for tests of rollbacks within one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch

import holdfast
from checkpointer.sampling import SkippingSampler
from stage.training import make_checkpointer

BATCH = 4
GO_BACK = holdfast.Spike("rollback", back=5)


def feed(sample: int, *, bad: Container[int], high: float = 90.0) -> float:
    """Return the loss of a sample: noise around 2, or a high value for a bad one."""
    return high if sample in bad else 2.0 + 0.02 * random.Random(sample).gauss(0, 1)


class Story:
    """A run whose only weight is the sum of all samples that it was trained on.

    Args:
        home: its home.
        bad: samples with a high value.
        metric: name of the recorded value.
        high: value of bad samples.
        options: those of the Checkpointer.
    """

    def __init__(
        self,
        home: Path,
        *,
        bad: Container[int],
        metric: str = "loss",
        high: float = 90.0,
        on_spike: holdfast.Spike = GO_BACK,
        **options: Any,
    ) -> None:
        self.home, self.on_spike = home, on_spike
        self.weight, self.data = torch.zeros(1, dtype=torch.float64), SkippingSampler(BATCH)
        self.seen: list[int] = []  # samples, with those of lost steps
        self._bad, self._metric, self._high = bad, metric, high
        self._options = {"every": 10, "keep": 3, **options}
        self.state = self.make_state(self.data)

    def make_state(self, data: SkippingSampler) -> dict[str, Any]:
        """Return a state with another sampler."""
        return {"weight": self.weight, "data": data}

    def train(self, total: int, *, before_step: Callable[[int], object] = lambda _: None) -> list[int]:
        """Train to the end; return the steps in the order in which they were completed."""
        done: list[int] = []
        with make_checkpointer(self.home, self.state, watches=[self.on_spike], **self._options) as ckpt:
            for step in ckpt.steps(total):
                before_step(step)
                self.step(ckpt)
                done.append(step + 1)
        return done

    def step(self, ckpt: holdfast.Checkpointer) -> None:
        """Train one step."""
        samples = self.data.take()
        self.seen += samples
        self.weight += sum(samples)
        ckpt.record(**{self._metric: feed(samples[0], bad=self._bad, high=self._high)})

    def left_out(self) -> set[int]:
        """Return the samples that are left out for ever."""
        return set().union(*(range(*one) for one in self.data.skipped))

    def trained(self) -> list[int]:
        """Return the samples that count, in order."""
        return [sample for sample in dict.fromkeys(self.seen) if sample not in self.left_out()]
