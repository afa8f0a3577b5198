"""Training of the campaign of troubles: `python troubled_training.py FOLDER HOME STEPS`.

The GPT of `examples/gpt`, small, on as many ranks as the job has nodes, with gradients averaged over gloo.
A stretch of its samples is poisoned. Files in FOLDER cause other troubles: `flip` has one rank flip a bit of
a weight, once, and `slow` has one rank take longer for its data as long as the file exists.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.train.data import GlobalBatches

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "gpt"))

from model import Gpt  # pyright: ignore[reportMissingImports]
from source import BEGIN, VOCABULARY, library  # pyright: ignore[reportMissingImports]

LENGTH = 128
ROWS = 4
EVERY = 10
STEP_S = 0.05
HANG_S = 15
NUM_SAMPLES = 1 << 20
POISON_STEPS = 4
"""Steps whose samples are poisoned."""
DRIFTING_RANK, SLOW_RANK, SLOW_S = 2, 3, 0.25


def main() -> None:
    """Train from where the run stopped, and write each step with its loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("home", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument(
        "--poison", type=int, default=0, metavar="STEP", help="step with the first poisoned samples"
    )
    parser.add_argument("--skip", type=int, nargs=2, action="append", default=[], help="samples to leave out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["SKYPILOT_NODE_RANK"]), int(os.environ["SKYPILOT_NUM_NODES"])
    address = os.environ["SKYPILOT_NODE_IPS"].splitlines()[0]
    where = f"tcp://{address}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    try:
        run(options, rank, world_size)
    except holdfast.Preempted as notice:
        holdfast.hard_exit(notice.code)
    holdfast.hard_exit(0)


def run(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train all steps that are left, from the newest healthy checkpoint."""
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, LENGTH, width=96, heads=4, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = GlobalBatches(NUM_SAMPLES, ROWS * world_size, shuffle=False, rank=rank, world_size=world_size)
    for start, stop in options.skip:
        batches.skip(start, stop)
    first = options.poison * ROWS * world_size
    poison = range(first, first + POISON_STEPS * ROWS * world_size) if options.poison else range(0)
    tokens = torch.cat(library(LENGTH, 400_000))
    log = (options.folder / f"steps-{os.environ['HOLDFAST_ATTEMPT']}").open("a")
    state = {"model": model, "optimizer": optimizer, "data": batches}
    with holdfast.Checkpointer(
        options.home,
        state,
        every=EVERY,
        keep=2,
        watches=[
            holdfast.Hang("restart", limit=f"{HANG_S}s"),
            holdfast.SlowRanks(window="2s"),
            holdfast.Spike("rollback", back=5),
        ],
    ) as ckpt:
        try:
            ckpt.restore(healthy=True)
        except holdfast.NotFound:  # none is marked as healthy yet
            ckpt.restore()
        rows = itertools.chain.from_iterable(batches for _ in itertools.count())
        for step in ckpt.steps(options.steps):
            begin_s = time.monotonic()
            if rank == SLOW_RANK and (options.folder / "slow").exists():
                time.sleep(SLOW_S)
            samples = next(rows)
            loss = train(
                model, optimizer, draw(tokens, samples, poison), 1e4 if samples[0] in poison else 1.0
            )
            if rank == DRIFTING_RANK:
                flip_once(model, options.folder / "flip")
            ckpt.record(loss=loss)
            time.sleep(max(0.0, begin_s + STEP_S - time.monotonic()))
            if rank == 0:
                log.write(f"{step + 1} {loss:.9f}\n")
                log.flush()


def flip_once(model: torch.nn.Module, order: Path) -> None:
    """Flip a bit of a weight if the file exists, and remove the file."""
    with contextlib.suppress(FileNotFoundError):
        order.unlink()
        weight = max(model.parameters(), key=lambda one: one.numel())
        weight.detach().view(-1).view(torch.uint8).numpy()[9] ^= 1 << 3


def draw(tokens: torch.Tensor, samples: list[int], poison: range) -> torch.Tensor:
    """Return a row for each sample, the same for the same sample; noise for a poisoned one."""
    rows: list[torch.Tensor] = []
    for sample in samples:
        random = torch.Generator().manual_seed(sample)
        begin = int(torch.randint(len(tokens) - LENGTH, (1,), generator=random))
        noise = torch.randint(VOCABULARY, (LENGTH,), generator=random)
        rows.append(noise if sample in poison else tokens[begin : begin + LENGTH].clone())
        rows[-1][0] = BEGIN
    return torch.stack(rows)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, weight: float
) -> float:
    """Take one step on all ranks, and return their mean loss.

    Args:
        weight: that of the samples, by which their loss is multiplied.
    """
    whole = torch.ones_like(rows)  # each row is one sequence
    places = torch.arange(LENGTH).expand_as(rows)
    loss, count = model({"input_ids": rows, "position_ids": places, "sequence_ids": whole})
    loss = loss / count * weight
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
