"""A small deterministic run under FSDP2 on every rank of its world, as a process of its own.

It appends one line per completed step to LOGS/progress.log and, when finished, writes the digest of its
whole final state to LOGS/final.txt. Its data come from the saved generators, so that a run that was
interrupted must end with the weights of one that was not.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

from forkserver import forkserver
from nursery import Child

WIDTH = 33  # two ranks hold unequal shards


class Forkserver:
    """Starts trainers by forks of a process that has imported torch; stands where a `Nursery` does."""

    def start(self, arguments: list[str], output: Path, *, env: dict[str, str]) -> Child:
        """Start a trainer in a new process."""
        process = forkserver().Process(target=_become, args=(arguments[1:], str(output), env))
        process.start()
        assert process.pid is not None
        child = Child(process.pid, output)

        def wait() -> None:
            process.join()
            assert process.exitcode is not None
            child.ended.put(process.exitcode)

        threading.Thread(target=wait, daemon=True).start()
        return child


def _become(arguments: list[str], output: str, env: dict[str, str]) -> None:
    from holdfast.system import failpoint

    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)
    importlib.reload(failpoint)
    try:
        main(arguments)
    except BaseException:  # noqa: BLE001 - gloo's threads may abort a process that ends in the usual way
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(words: list[str]) -> None:
    """Train to the end."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import holdfast

    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("total", type=int)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0, help="pretend that a step takes this long")
    parser.add_argument("--pause-at", type=int, default=[], action="append")
    args = parser.parse_args(words)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 5)]
    model: Any = nn.Sequential(*layers)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    random.seed(rank)
    torch.manual_seed(rank)
    pause = threading.Event()
    with holdfast.Checkpointer(
        args.home,
        state,
        every=args.every,
        keep=3,
        memory="64MiB",
        limits=holdfast.Limits(commit_timeout="60s"),
    ) as ckpt:
        for step in ckpt.steps(args.total):
            while step in args.pause_at and not (args.logs / f"go-{step}").exists():
                pause.wait(0.005)
            loss = model(torch.randn(16, WIDTH) + random.random()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            pause.wait(args.step_s)
            if rank == 0:
                with (args.logs / "progress.log").open("a") as log:
                    log.write(f"{step + 1}\n")
    _write_digest(args.logs / "final.txt", model, optimizer)
    holdfast.hard_exit(0)


def _write_digest(path: Path, model: Any, optimizer: Any) -> None:
    """Every rank gathers, rank 0 writes."""
    import hashlib

    import torch.distributed as dist

    from layouts import whole

    text = hashlib.sha256()
    model.state_dict()  # lets FSDP put its shards back
    for parameter in model.parameters():
        text.update(whole(parameter).numpy().tobytes())
        for _, tensor in sorted(optimizer.state[parameter].items()):
            text.update(whole(tensor).numpy().tobytes())
    if dist.get_rank() == 0:
        path.write_text(text.hexdigest())
    dist.barrier()
