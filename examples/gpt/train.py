"""A small GPT on the source of Python's library: packed, sharded, compiled, and kept going.

torchrun --standalone --nproc-per-node 2 examples/gpt/train.py [--home DIR] [--steps N]
holdfast launch examples/gpt/task.yaml

Kill it whenever you like and start it again, on as many ranks as you like: its loss continues from there.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from model import Gpt
from source import VOCABULARY, library, pack
from torch import Tensor
from torch.utils.data import DataLoader

import holdfast
from holdfast.train.data import GlobalBatches


def main() -> None:
    """Train from where the run stopped."""
    args = read_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        train(args, device)
    except holdfast.Preempted as notice:  # what matters is durable; the next start resumes
        holdfast.hard_exit(notice.code)
    holdfast.hard_exit(0)  # a finished gloo process may otherwise be aborted by its own threads


def train(args: argparse.Namespace, device: str) -> None:
    """All steps that are left, on this rank together with the others."""
    torch.manual_seed(args.seed)  # every rank draws the same weights, and keeps its part
    model = Gpt(VOCABULARY, args.length)
    model = holdfast.shard(model, compile=not args.eager, quiet=args.quiet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    packed = pack(library(args.length, args.bytes), args.length)
    # A batch is drawn for all ranks together, so its rows are the same on however many they are.
    batches = GlobalBatches(len(packed), args.batch, seed=args.seed, drop_last=True)
    loader = DataLoader(packed, batch_sampler=batches)  # pyright: ignore[reportArgumentType] - a list will do
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    with holdfast.Checkpointer(args.home, state, every=args.every, quiet=args.quiet) as ckpt:
        rows = rows_of(loader, device)
        for step in ckpt.steps(args.steps):
            loss, count = model(next(rows))
            sums = torch.stack([loss.detach(), count])
            if dist.is_initialized():
                dist.all_reduce(sums)  # of all ranks: what is told, and what the gradient is divided by
            optimizer.zero_grad()
            (loss * num_ranks() / sums[1]).backward()  # shard() takes the mean over the ranks
            optimizer.step()
            scheduler.step()
            ckpt.record(loss=sums[0] / sums[1], lr=scheduler.get_last_lr()[0])
            if (step + 1) % args.tell == 0 and rank() == 0:
                print(f"step {step + 1}: loss {sums[0] / sums[1]:.4f}", flush=True)


def rows_of(loader: DataLoader[Any], device: str) -> Iterator[dict[str, Tensor]]:
    """Batches for ever. The first is asked for after the restore, so it is the one where the run stopped."""
    while True:
        for row in loader:
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in row.items()}


def rate(step: int, num_steps: int) -> float:
    """Share of the learning rate: rises for 20 steps, then falls along a cosine to a tenth."""
    return min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * min(step / num_steps, 1)))


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def read_arguments() -> argparse.Namespace:
    """What the caller wants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", default="runs/gpt", help="folder or URL of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=16, help="rows in each step, on all ranks together")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--bytes", type=int, default=2_000_000, help="how much source is learnt")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tell", type=int, default=10, help="steps between lines of output")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--quiet", action="store_true", help="only the lines with the loss")
    return parser.parse_args()


if __name__ == "__main__":
    main()
