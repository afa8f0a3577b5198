"""Training under `supervise`, whose ranks fail as the environment asks: `python supervised_training.py HOME`.

FAIL has lines such as `0:1:7:kill`: in the first process or call of rank 1, at step 7, it is killed. Each
failure happens once: a file marks it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast

HOME = Path(sys.argv[1])
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS, EVERY = 12, 2


def note(**facts: object) -> None:
    with HOME.with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps({"rank": RANK, "pid": os.getpid(), **facts}) + "\n")


def fail(step: int) -> None:
    """Fail as the environment asks for this rank and step."""
    for number, line in enumerate(os.environ.get("FAIL", "").split()):
        rank, at, how = line.split(":")
        mark = HOME.with_suffix(f".{number}")
        if (int(rank), int(at)) != (RANK, step) or (mark.exists() and how != "always"):
            continue
        mark.touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            threading.Event().wait()
        raise ValueError(f"{how} of rank {RANK}")


def train() -> str:
    torch.manual_seed(3)
    fail(-1)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    model = nn.Linear(8, 8)
    trained: nn.Module = model
    if "FSDP" in os.environ:
        fully_shard(model)
    elif WORLD_SIZE > 1:
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watches = None if "ALONE" in os.environ else ()  # the default ones handle signals
    run = holdfast.Checkpointer(HOME, {"model": model, "optimizer": optimizer}, every=EVERY, watches=watches)
    note(began=True, drawn=torch.rand(1).item())
    for step in run.steps(STEPS):
        fail(step)
        numbers = torch.Generator().manual_seed(step * WORLD_SIZE + RANK)
        optimizer.zero_grad()
        loss = trained(torch.randn(4, 8, generator=numbers)).square().mean()
        loss.backward()
        optimizer.step()
        note(step=step, loss=loss.item())
    run.close()
    if RANK == 0 and "FSDP" not in os.environ:
        torch.save(model.state_dict(), HOME.with_suffix(".pt"))
    if "LATE" in os.environ and RANK == 0:
        fail(STEPS)
        time.sleep(float(os.environ["LATE"]))
    if WORLD_SIZE > 1:
        dist.destroy_process_group()
    return "returned"


if __name__ == "__main__":
    if "THREAD" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    note(found=holdfast.supervise(train, restart=os.environ.get("RESTART", "rank"), max_restarts=2))  # type: ignore[arg-type]
    holdfast.hard_exit(0)
