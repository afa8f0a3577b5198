"""torch.distributed.checkpoint on one rank: its own files, and HoldfastWriter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from holdfast.adapters.dcp import HoldfastWriter

from .contract import Blocked, Method, Training


def _train(training: Training, blocked: Blocked, save: Callable[[dict[str, Any], int], Any]) -> None:
    model = training.make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def save_now(step: int) -> Any:
        return save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)

    timed, futures = blocked.timed(save_now), []
    for step in range(1, training.steps + 1):
        model(training.make_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % training.every == 0:
            futures.append(timed(step))
    for future in futures:
        if hasattr(future, "result"):
            future.result()


def _stock(training: Training, blocked: Blocked) -> None:
    _train(training, blocked, lambda state, step: dcp.save(state, checkpoint_id=training.folder / str(step)))


def _stock_async(training: Training, blocked: Blocked) -> None:
    def save(state: dict[str, Any], step: int) -> Any:
        return dcp.async_save(state, checkpoint_id=training.folder / str(step))

    _train(training, blocked, save)


def _ours(training: Training, blocked: Blocked) -> None:
    def save(state: dict[str, Any], step: int) -> Any:
        return dcp.save(state, storage_writer=HoldfastWriter(str(training.folder), step=step))

    _train(training, blocked, save)


def _ours_async(training: Training, blocked: Blocked) -> None:
    def save(state: dict[str, Any], step: int) -> Any:
        return dcp.async_save(state, storage_writer=HoldfastWriter(str(training.folder), step=step))

    _train(training, blocked, save)


METHODS: dict[str, Method] = {
    "dcp.save": _stock,
    "dcp.async_save": _stock_async,
    "dcp.save, HoldfastWriter": _ours,
    "dcp.async_save, HoldfastWriter": _ours_async,
}
