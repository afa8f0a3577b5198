"""A small GPT whose data has a poisoned stretch: `python spiking.py HOME STEPS [options]`, for rollbacks.

Prints each completed step with its loss on rank 0, and at the end the loss on samples that nobody trains on.
With torchrun's environment it runs on several gloo ranks, under DDP or FSDP2.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast

sys.path[:0] = [str(Path(__file__).parents[2] / "examples" / "gpt"), str(Path(__file__).parents[1])]
from model import Gpt  # pyright: ignore[reportMissingImports]

from checkpointer.sampling import LENGTH, VOCABULARY, SkippingSampler, draw

BATCH = 8
HELD_OUT = range(10**6, 10**6 + 64)


def main() -> None:
    """Train from where the run stopped."""
    args = read_arguments()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model: Any = Gpt(VOCABULARY, LENGTH, width=32, heads=2, layers=1)
    if args.layout == "ddp":
        model = DistributedDataParallel(model)
    elif args.layout == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = SkippingSampler(BATCH)
    data.position = args.seed * 10**5
    poison = range(*args.poison)
    state = {"model": model, "optimizer": optimizer, "data": data}
    on_spike = holdfast.Spike(args.on_spike, back=args.back, max_rollbacks=args.max_rollbacks)
    with holdfast.Checkpointer(
        args.home, state, every=args.every, keep=args.keep, watches=[on_spike]
    ) as ckpt:
        for step in ckpt.steps(args.steps):
            samples = data.take()
            mine = samples[rank :: dist.get_world_size()] if dist.is_initialized() else samples
            loss = loss_of(model, mine, poison)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(shown)
                shown /= dist.get_world_size()
            ckpt.record(loss=shown)
            if rank == 0:
                print(
                    f"step {step + 1} samples {samples[0]}-{samples[-1]} loss {float(shown):.3f}", flush=True
                )
    with torch.no_grad():
        final = float(loss_of(model, list(HELD_OUT), range(0)))
    if rank == 0:
        print(f"final {final:.4f} skipped {data.skipped}", flush=True)
    holdfast.hard_exit()


def loss_of(model: Any, samples: list[int], poison: range) -> torch.Tensor:
    """Return the weighted mean loss of samples."""
    rows, weights = zip(*(draw(sample, poison) for sample in samples), strict=True)
    tokens = torch.stack(rows)
    row = {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": torch.arange(LENGTH).expand_as(tokens),
        "sequence_ids": torch.zeros_like(tokens),
    }
    loss, count = model(row)
    return loss / count * (sum(weights) / len(weights))


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument(
        "--poison", type=int, nargs=2, default=(0, 0), help="first poisoned sample, and the end"
    )
    parser.add_argument("--on-spike", default="report")
    parser.add_argument("--back", type=int, default=5)
    parser.add_argument("--max-rollbacks", type=int, default=3)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--layout", choices=("plain", "ddp", "fsdp2"), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
