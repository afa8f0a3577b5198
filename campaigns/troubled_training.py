"""Training of the campaign of troubles: `python troubled_training.py FOLDER HOME STEPS`.

The GPT of `examples/gpt`, small, on as many ranks as the job has nodes, with gradients averaged over gloo.
The batch of a step is a function of its number, so an interrupted run has the loss of an uninterrupted one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

from model import Gpt  # pyright: ignore[reportMissingImports]
from source import BEGIN, VOCABULARY, library  # pyright: ignore[reportMissingImports]

LENGTH = 128
ROWS = 4
EVERY = 10
STEP_S = 0.05
HANG_S = 15


def main() -> None:
    """Train from where the run stopped, and write each step with its loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("home", type=Path)
    parser.add_argument("steps", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["SKYPILOT_NODE_RANK"]), int(os.environ["SKYPILOT_NUM_NODES"])
    address = os.environ["SKYPILOT_NODE_IPS"].splitlines()[0]
    where = f"tcp://{address}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, LENGTH, width=96, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.cat(library(LENGTH, 400_000))
    log = (options.folder / f"steps-{os.environ['HOLDFAST_ATTEMPT']}").open("a")
    on_hang = holdfast.Hang("restart", limit=f"{HANG_S}s")
    state = {"model": model, "optimizer": optimizer}
    try:
        with holdfast.Checkpointer(options.home, state, every=EVERY, keep=2, on_hang=on_hang) as ckpt:
            for step in ckpt.steps(options.steps):
                begin_s = time.monotonic()
                loss = train(model, optimizer, draw(tokens, step * world_size + rank))
                ckpt.record(loss=loss)
                time.sleep(max(0.0, begin_s + STEP_S - time.monotonic()))
                if rank == 0:
                    log.write(f"{step + 1} {loss:.9f}\n")
                    log.flush()
    except holdfast.Preempted as notice:
        holdfast.hard_exit(notice.code)
    holdfast.hard_exit(0)


def draw(tokens: torch.Tensor, number: int) -> torch.Tensor:
    """Return a batch of rows, the same for the same number."""
    random = torch.Generator().manual_seed(number)
    begins = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=random)
    rows = torch.stack([tokens[begin : begin + LENGTH] for begin in begins.tolist()])
    rows[:, 0] = BEGIN
    return rows


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    """Take one step on all ranks, and return their mean loss."""
    whole = torch.ones_like(rows)  # each row is one sequence
    places = torch.arange(LENGTH).expand_as(rows)
    loss, count = model({"input_ids": rows, "position_ids": places, "sequence_ids": whole, "labels": rows})
    loss = loss / count
    optimizer.zero_grad()
    loss.backward()
    parts = [one.grad for one in model.parameters() if one.grad is not None]
    flat = torch.cat([*(one.flatten() for one in parts), loss.detach().reshape(1)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(parts, flat[:-1].split([one.numel() for one in parts]), strict=True):
        gradient.copy_(part.view_as(gradient))
    optimizer.step()
    return float(flat[-1])


if __name__ == "__main__":
    main()
