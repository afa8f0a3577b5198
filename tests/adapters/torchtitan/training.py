"""Training with torchtitan's containers and FSDP2 on gloo ranks, one process per rank.

Usage: training.py FOLDER PLAN, a plan in JSON. Each rank prints one JSON object with the steps and digests.
"""

# torchtitan is not in every environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from adapters.digest import digest
from adapters.exports import by_name, whole
from holdfast.adapters.torchtitan import HoldfastCheckpointManager

ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Data:
    """Batches from a generator; its position is the number of batches, and its key names the rank."""

    def __init__(self, rank: int) -> None:
        self.key = f"dp_rank_{rank}"
        self.count = 0

    def next(self) -> torch.Tensor:
        self.count += 1
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(self.count))

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, self.key: {"count": self.count}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A rank that is new goes on where all others are.
        counts = [value["count"] for key, value in state_dict.items() if key.startswith("dp_rank_")]
        self.count = state_dict[self.key]["count"] if self.key in state_dict else counts[0]


class Training:
    """A trainer with the attributes that torchtitan's has for its checkpoint manager."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
        for layer in (self.model[0], self.model[2]):
            fully_shard(layer)
        fully_shard(self.model)
        groups = [
            ParamGroupConfig(pattern="bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 0.02}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=ADAMW),
        ]
        optimizer_config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = OptimizersContainer(optimizer_config, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.data = Data(dist.get_rank())
        self.step = 0
        self.seen = 0
        is_stock = options.pop("stock", False)
        manager = CheckpointManager if is_stock else HoldfastCheckpointManager
        self.checkpointer = manager.Config(enable=True, folder="checkpoint", **options).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.seen = state_dict["step"], state_dict["seen"]

    def train_step(self) -> None:
        batch = self.data.next()
        self.seen += len(batch)
        self.optimizers.zero_grad()
        (self.model(batch) - batch.flip(1)).square().mean().backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()

    def digests(self) -> dict[str, str]:
        """Return hashes of the model, of what is equal on any number of ranks, and of all of a resume."""
        model = self.model.state_dict()
        states = {**model, **self.optimizers.state_dict()}
        counters = self.schedulers.state_dict(), self.state_dict(), self.data.count
        everything = states, counters, torch.get_rng_state()
        return {"model": digest(model), "whole": digest((states, self.step)), "digest": digest(everything)}


def keep_live(training: Training, folder: str) -> None:
    """Write the whole state of rank 0 to a file, by the names of a checkpoint."""
    found: dict[str, Any] = {
        f"optimizer_{n}": by_name(one, training.model) for n, one in enumerate(training.optimizers)
    }
    found["model"] = {name: whole(one) for name, one in training.model.state_dict().items()}
    found["train_state"], found["lr_scheduler"] = training.state_dict(), training.schedulers.state_dict()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, training.data.state_dict())
    found["dataloader"] = {key: value for of_one in ranks for key, value in of_one.items()}
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/live-0.pt")


def main(folder: str, plan: dict[str, Any]) -> None:
    alone = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {name: value for name, value in alone.items() if name not in os.environ}
    dist.init_process_group("gloo")
    total, keeps_live = plan.pop("steps"), plan.pop("live", False)
    kill_at, waits = plan.pop("kill_at", 0), plan.pop("waits", True)
    is_victim, number = plan.pop("rank", 0) == dist.get_rank(), plan.pop("signal", signal.SIGKILL)
    for name in ("resume", "is_saved"):  # a start always resumes, and is killed after its save
        plan.pop(name, None)
    load_step = plan.get("load_step", -1)
    training = Training(folder, plan)
    loaded = training.checkpointer.load(step=load_step)
    first = training.step
    saved = []
    while training.step < total:
        training.step += 1
        training.train_step()
        is_place = training.step == kill_at
        if is_place and is_victim and number != signal.SIGKILL:
            os.kill(os.getpid(), number)
        if training.checkpointer.save(training.step, last_step=training.step == total):
            saved.append(training.step)
        if is_place and number == signal.SIGKILL:
            if waits:
                training.checkpointer.maybe_wait_for_saving()
            dist.barrier()
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
    found = {"loaded": loaded, "first": first, "saved": saved, "step": training.step, **training.digests()}
    training.checkpointer.close()
    if keeps_live:
        keep_live(training, folder)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
