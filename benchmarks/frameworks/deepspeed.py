"""DeepSpeed with ZeRO 1 on one rank: its own files, and `attach`."""

# DeepSpeed is not in every environment, and has no type information.
# pyright: reportMissingImports=false

# Pyright takes this file for the package.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from holdfast.adapters.deepspeed import attach

from .contract import BATCH, Blocked, Method, Training


def _train(training: Training, blocked: Blocked, *, is_attached: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = training.make_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine: Any = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if is_attached:
        attach(engine, quiet=True)
    save = blocked.timed(engine.save_checkpoint)
    for step in range(1, training.steps + 1):
        engine.backward(engine(training.make_batch()).square().mean())
        engine.step()
        if step % training.every == 0:
            save(str(training.folder))
    if is_attached:
        blocked.waits_s.append(engine.holdfast_session.waited_for_copy_s)
    engine.destroy()
    torch.distributed.destroy_process_group()


METHODS: dict[str, Method] = {
    "save_checkpoint": partial(_train, is_attached=False),
    "save_checkpoint, attached": partial(_train, is_attached=True),
}
