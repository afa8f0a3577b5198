"""A training with everything that a search could disturb, and its state, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.train.batch.training_step import resize

PEAK_LIMIT = 8_000_000


class Training:
    """A training with dropout, batch norm, a scheduler, gradients, generators and plain values.

    Args:
        warm: make two steps first.
    """

    def __init__(self, *, warm: bool = True) -> None:
        torch.manual_seed(3)
        random.seed(3)
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.average = torch.zeros(64)
        self.generator = torch.Generator().manual_seed(5)
        self.num_steps = 0
        self.sample = {"x": torch.randn(8, 64), "note": "kept"}
        if warm:
            self.step(self.sample)
            self.step(self.sample)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "more": [self.scheduler, self.average, {"generator": self.generator}],
            "epoch": 3,
        }

    def batch_of(self, size: int) -> Any:
        """Return a batch of a size."""
        return resize(self.sample, size)

    def fit(self, **options: Any) -> holdfast.BatchFit:
        """Search for a batch size."""
        return holdfast.fit_batch(self.step, self.sample, self.state, **options)

    def step(self, batch: dict[str, Any]) -> None:
        """Run one step and keep its gradients."""
        self.num_steps += 1
        self.optimizer.zero_grad()
        noise = torch.rand(1, generator=self.generator)
        loss = (self.model(batch["x"]) - batch["x"] * noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average += loss.item() * random.random()

    def fingerprint(self) -> list[Any]:
        """Return the whole state as bytes and plain values."""
        tensors = [*self.model.state_dict().values(), self.average, self.generator.get_state()]
        tensors += [one.grad for one in self.model.parameters() if one.grad is not None]
        states = [self.optimizer.state.get(one, {}) for one in self.model.parameters()]
        tensors += [one for state in states for one in state.values()]
        facts = [sorted(state) for state in states], self.scheduler.state_dict(), random.getstate()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        modes = [module.training for module in self.model.modules()]
        return [one.numpy().tobytes() for one in (*tensors, torch.get_rng_state())] + [facts, groups, modes]
