"""A loop of one's own: `torch.save`, and a Checkpointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast import Checkpointer

from .contract import Blocked, Method, Training


def _train(training: Training, model: Any, optimizer: Any, save: Callable[[int], Any]) -> None:
    for step in range(1, training.steps + 1):
        model(training.make_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % training.every == 0:
            save(step)


def _stock(training: Training, blocked: Blocked) -> None:
    model = training.make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, training.folder / f"{step}.pt")

    _train(training, model, optimizer, blocked.timed(save))


def _ours(training: Training, blocked: Blocked) -> None:
    model = training.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(str(training.folder), state, quiet=True) as ckpt:
        _train(training, model, optimizer, blocked.timed(ckpt.save))


METHODS: dict[str, Method] = {"torch.save": _stock, "Checkpointer": _ours}
