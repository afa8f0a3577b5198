"""torch.distributed.checkpoint on one rank: its own files, and HoldfastWriter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from holdfast.adapters.dcp import HoldfastWriter

from .contract import Blocked, Method, Training


def _train(training: Training, blocked: Blocked, save_state: Callable[[dict[str, Any], int], Any]) -> None:
    model = training.make_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def save_now(step: int) -> Any:
        return save_state({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)

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
    _train(training, blocked, lambda state, step: save(state, checkpoint_id=training.folder / str(step)))


def _stock_async(training: Training, blocked: Blocked) -> None:
    def save_state(state: dict[str, Any], step: int) -> Any:
        return async_save(state, checkpoint_id=training.folder / str(step))

    _train(training, blocked, save_state)


def _ours(training: Training, blocked: Blocked) -> None:
    def save_state(state: dict[str, Any], step: int) -> Any:
        return save(state, storage_writer=HoldfastWriter(str(training.folder), step=step))

    _train(training, blocked, save_state)


def _ours_async(training: Training, blocked: Blocked) -> None:
    def save_state(state: dict[str, Any], step: int) -> Any:
        return async_save(state, storage_writer=HoldfastWriter(str(training.folder), step=step))

    _train(training, blocked, save_state)


METHODS: dict[str, Method] = {
    "dcp.save": _stock,
    "dcp.async_save": _stock_async,
    "dcp.save, HoldfastWriter": _ours,
    "dcp.async_save, HoldfastWriter": _ours_async,
}
