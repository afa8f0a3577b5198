"""torchtitan's containers on one rank: its own manager, also with async saves, and Holdfast's."""

# torchtitan is not in every environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from holdfast.adapters.torchtitan import HoldfastCheckpointManager

from .contract import Blocked, Method, Training


class _Data:
    """Position in the data of one rank."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "dp_rank_0": {"count": self.count}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["dp_rank_0"]["count"]


def _train(training: Training, blocked: Blocked, *, manager: Any, mode: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    model = training.make_model()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    optimizers = OptimizersContainer(
        OptimizersContainer.Config(param_groups=[group], implementation="for-loop"), model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
        optimizers=optimizers, training_steps=training.steps
    )
    options = {"enable": True, "folder": "checkpoint", "interval": training.every, "async_mode": mode}
    checkpointer = manager.Config(**options).build(
        dataloader=_Data(),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(training.folder),
    )
    checkpointer.load()
    save = blocked.timed(checkpointer.save)
    wait = blocked.timed_wait(checkpointer.maybe_wait_for_staging)
    for step in range(1, training.steps + 1):
        optimizers.zero_grad()
        model(training.make_batch()).square().mean().backward()
        wait()
        optimizers.step()
        schedulers.step()
        if step % training.every == 0:
            save(step, last_step=step == training.steps)
    checkpointer.close()
    dist.destroy_process_group()


METHODS: dict[str, Method] = {
    "CheckpointManager": partial(_train, manager=CheckpointManager, mode="disabled"),
    "CheckpointManager, async": partial(_train, manager=CheckpointManager, mode="async"),
    "HoldfastCheckpointManager": partial(_train, manager=HoldfastCheckpointManager, mode="async"),
}
