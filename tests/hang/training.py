"""A training that hangs in one of several ways, or is only slow, on one or more gloo ranks.

Arguments: the way, the rank that does it, the home, and the options of `Hang` as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any, cast

import torch
import torch.distributed as dist

import holdfast

WAY, ODD, HOME, OPTIONS = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_ODD = RANK == ODD
AT, TOTAL = 14, 60


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Samples; the worker that makes the one of step AT deadlocks, if that is asked."""

    def __len__(self) -> int:
        return 4 * TOTAL

    def __getitem__(self, index: int) -> torch.Tensor:
        if WAY == "loader" and IS_ODD and index == 4 * AT:
            lock = threading.Lock()
            with lock:
                lock.acquire()
        return torch.full((20,), float(index % 7))


def spin() -> None:
    """Never return, and never release the processor."""
    while True:
        pass


def evaluate(seconds: float) -> None:
    """Take long, as evaluations do."""
    time.sleep(seconds)


def trouble(step: int, ckpt: holdfast.Checkpointer, others: Any) -> None:
    """Do in a step what the way asks for."""
    if WAY == "uneven":
        time.sleep((step * 37 % 11) / 10)
    if step != AT:
        return
    if IS_ODD:
        odd_trouble(ckpt, others)
    elif WAY == "skip":
        dist.all_reduce(torch.ones(7), group=others)


def odd_trouble(ckpt: holdfast.Checkpointer, others: Any) -> None:
    """Do what the way asks of one rank."""
    match WAY:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "loop":
            spin()
        case "sleep":
            time.sleep(1000)
        case "gil":  # a function of C that keeps the lock of the interpreter
            sum(range(10**12))
        case "extra":
            dist.all_reduce(torch.ones(3), group=others)
        case "phase":
            with ckpt.phase("eval"):
                time.sleep(7)
        case "evaluation":
            evaluate(7)
        case _:
            pass


def main() -> None:
    """Train."""
    others = None
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        others = dist.new_group()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(20, 20)
    if WORLD_SIZE > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if WAY == "compile":
        model = cast(torch.nn.Module, torch.compile(model))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(HOME, state, every=5, watches=[holdfast.Hang(**OPTIONS)], quiet=True) as ckpt:
        workers = 1 if WAY == "loader" else 0
        batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=workers))
        for step in ckpt.steps(TOTAL):
            loss = model(next(batches)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trouble(step, ckpt, others)
            time.sleep(0.01)


main()
