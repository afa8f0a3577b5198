"""A training whose ranks have different amounts of work, on gloo ranks.

Arguments: the way, the rank that does it, the home, seconds, the options of `SlowRanks` as JSON, and the kind
of parallelism. It ends after the seconds, or when the file "stop" appears beside the home.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast

WAY, ODD, HOME = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
SECONDS, OPTIONS, KIND = float(sys.argv[4]), json.loads(sys.argv[5]), sys.argv[6]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_ODD = RANK == ODD
SIZE, LAYERS = 256, 4


class Data(torch.utils.data.IterableDataset[torch.Tensor]):
    """Samples without end; those of one rank come late, if that is asked."""

    def __iter__(self) -> Any:
        while True:
            if WAY == "loader" and IS_ODD:
                time.sleep(0.04)
            yield torch.randn(32, SIZE)


def read_slowly(file: int) -> None:
    """Write and sync a little, as a checkpoint or a log on a slow disk does."""
    os.pwrite(file, b"x" * 4096, 0)
    for _ in range(8):
        os.fsync(file)
    time.sleep(0.03)  # the rest of what a slow disk takes


def make_model() -> torch.nn.Module:
    """Return the model, sharded or replicated."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
    if KIND == "ddp":
        return torch.nn.parallel.DistributedDataParallel(layers)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    return layers


def evaluate(seconds: float) -> None:
    """Take long, as evaluations do."""
    time.sleep(seconds)


def extra_work(step: int, choice: random.Random, file: int, ckpt: holdfast.Checkpointer) -> None:
    """Do in a step what the way asks for."""
    match WAY:
        case "sequences" if choice.randrange(WORLD_SIZE) == RANK:  # equal numbers on all ranks
            time.sleep(0.03)
        case "evaluation" if IS_ODD and step % 40 == 39:
            evaluate(0.7)
        case "phase" if IS_ODD and step % 40 == 39:
            with ckpt.phase("eval"):
                time.sleep(0.7)
        case "disk" if IS_ODD:
            read_slowly(file)
        case "half" if RANK % 2:  # as many as not
            time.sleep(0.03)
        case "all" if step > 200:
            time.sleep(0.03)
        case _:
            pass


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(RANK)
    model = make_model()
    if WAY == "compile":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    choice, ended = random.Random(7), torch.zeros(1)
    state = {"model": model, "optimizer": optimizer}
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=None))
    file = os.open(HOME.parent / f"file-{RANK}", os.O_RDWR | os.O_CREAT)
    every = 50 if WAY == "saves" else 10**6
    slow = holdfast.SlowRanks(**OPTIONS)
    with holdfast.Checkpointer(str(HOME), state, every=every, watches=[slow], quiet=True) as ckpt:
        end_s = time.monotonic() + SECONDS
        for step in ckpt.steps(10**6):
            extra_work(step, choice, file, ckpt)
            model(next(batches)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0:
                ended[0] = float(time.monotonic() > end_s or (HOME.parent / "stop").exists())
                dist.broadcast(ended, 0)
                if ended:
                    break
    dist.destroy_process_group()


main()
