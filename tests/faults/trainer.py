"""A small deterministic training run as its own process: `trainer.py HOME TOTAL --logs LOGS [options]`.

It appends one line per completed step to LOGS/progress.log and, when finished, writes the digest of its
final state to LOGS/final.txt. Its data depend on the step alone and on the saved generators, so that a run
that was interrupted must end with the weights of one that was not.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import socket
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.checkpoint.run import pipeline
from holdfast.checkpoint.stage import stager
from holdfast.system import failpoint


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("total", type=int)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--every", default="2")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the ranks")
    parser.add_argument("--step-s", type=float, default=0.0, help="pretend that a step takes this long")
    parser.add_argument("--pause-at", type=int, default=[], action="append", help="see `pause`")
    parser.add_argument("--commit-timeout", default="60s")
    parser.add_argument("--failed-saves", default="warn")
    parser.add_argument("--patience", default="1h", help="how long saves may fail")
    parser.add_argument("--local", help="{rank} in it stands for this rank's number")
    parser.add_argument("--keep-local", type=int, default=2)
    parser.add_argument("--bucket", help="URL of the home, instead of HOME")
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--home-every", type=int)
    parser.add_argument("--wait-home", action="store_true", help="wait until home has each save that is due")
    parser.add_argument("--hold", default="0")
    parser.add_argument("--take-over", action="store_true")
    parser.add_argument("--bandwidth", help="to home, per second")
    parser.add_argument("--peers", type=int)
    parser.add_argument("--host", help="name of this rank's host; {rank} in it stands for the rank's number")
    return parser.parse_args()


def make_model(width: int, *, is_sharded: bool) -> nn.Module:
    """A small model; under FSDP2 without buffers, which would differ from rank to rank."""
    norm = nn.LayerNorm(width) if is_sharded else nn.BatchNorm1d(width)
    first = nn.Linear(width, width)
    model = nn.Sequential(first, norm, nn.Dropout(0.1), nn.Linear(width, 8))
    if is_sharded:
        fully_shard(first)
        fully_shard(model)
    return model


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash of every tensor of a model and its optimizer, as a whole. Under FSDP2 it is collective."""
    tensors = list(model.state_dict().values())
    for state in optimizer.state.values():
        tensors += [tensor for _, tensor in sorted(state.items())]
    text = hashlib.sha256()
    for tensor in tensors:
        text.update((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().tobytes())
    return text.hexdigest()


def signal_at(point: str) -> None:
    """Have this process send itself SIGTERM when it first reaches a failpoint."""
    reached = failpoint.failpoint

    def stand_in(name: str) -> None:
        nonlocal point
        if name == point:
            point = ""
            os.kill(os.getpid(), signal.SIGTERM)
        reached(name)

    for module in (stager, pipeline):
        setattr(module, "failpoint", stand_in)  # noqa: B010 - a module's names are not declared


def set_clock(offset_s: float) -> None:
    """Let this process live at another time; its keeper gets there by clock/sitecustomize.py."""
    now = time.time
    time.time = lambda: now() + offset_s


def pause(go: Path) -> None:
    """Wait until the test makes a file; a test that never does can kill this process whenever it likes."""
    while not go.exists():
        time.sleep(0.005)


def has_manifest(home: Path, step: int) -> bool:
    return any((home / f"step-{step:08d}").glob("manifest-*"))


def main() -> None:  # noqa: C901 - one option after the other
    args = arguments()
    set_clock(float(os.environ.get("CLOCK_OFFSET_S", "0")))
    if point := os.environ.get("TRAINER_SIGNAL_AT"):
        signal_at(point)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    if args.host:
        socket.gethostname = lambda: args.host.format(rank=rank)
    torch.manual_seed(1)
    model = make_model(args.width, is_sharded=args.fsdp)
    is_copied = dist.is_initialized() and not args.fsdp
    net = nn.parallel.DistributedDataParallel(model) if is_copied else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    state: dict[str, object] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    every = int(args.every) if args.every.isdigit() else args.every
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    with holdfast.Checkpointer(
        holdfast.Home(args.bucket or args.home, every=args.home_every, bandwidth=args.bandwidth),
        state,
        every=every,
        keep=args.keep,
        local=args.local and holdfast.Local(args.local.format(rank=rank), keep=args.keep_local),
        take_over=args.take_over,
        peers=args.peers and holdfast.Peers(args.peers, keep_for="60s"),
        memory=holdfast.Memory(args.memory, keep_for=args.hold),
        limits=holdfast.Limits(
            failed_saves=args.failed_saves, patience=args.patience, commit_timeout=args.commit_timeout
        ),
    ) as ckpt:
        for step in ckpt.steps(args.total):
            if step in args.pause_at:
                pause(args.logs / f"go-{step}")
            if args.wait_home and step and step % args.home_every == 0:
                while not has_manifest(args.home, step):  # the test that started this process has a limit
                    time.sleep(0.01)
            noise = random.random() + float(np.random.rand())
            inputs = torch.randn(16, args.width) + noise
            loss = net(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.record(loss=loss, lr=scheduler.get_last_lr()[0])
            time.sleep(args.step_s)
            if rank == 0:
                with (args.logs / "progress.log").open("a") as log:
                    log.write(f"{step + 1}\n")
    final = digest(model, optimizer)
    if rank == 0:
        (args.logs / "final.txt").write_text(final)
    if args.fsdp:
        dist.barrier()
    holdfast.hard_exit(0)


if __name__ == "__main__":
    main()
