"""The training of jobs under test: `python training.py HOME TOTAL [--every N] [--step-s S]`.

A small model on seeded data. Every completed step is a line of progress.log beside the home; the digest of
the final weights goes to final.txt. On several ranks (torchrun's environment) gradients are summed over gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def main() -> None:
    """Train, resuming where the run stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("total", type=int)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--pause-at", type=int, help="wait for a notice, in the first attempt")
    parser.add_argument("--hang-at", type=int, help="hang on the last rank before this step is complete")
    parser.add_argument("--hangs", type=int, default=1, help="attempts that hang")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    folder, attempt = args.home.parent, os.environ.get("HOLDFAST_ATTEMPT")
    (folder / f"parent-{attempt}").write_bytes(Path(f"/proc/{os.getppid()}/cmdline").read_bytes())
    watches = [] if args.hang_at is None else [holdfast.Hang("restart", limit="4s")]
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    with holdfast.Checkpointer(args.home, state, every=args.every, watches=watches) as ckpt:
        for step in ckpt.steps(args.total):
            if step == args.pause_at and attempt == "1":
                wait_for_notice(ckpt)
            if step == args.hang_at and rank == last and int(attempt or 1) <= args.hangs:
                time.sleep(1000)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            if dist.is_initialized():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            ckpt.record(loss=loss)
            if args.step_s:
                time.sleep(args.step_s)  # as a step of a greater model would take
            if rank == 0:
                with (folder / "progress.log").open("a") as log:
                    log.write(f"{attempt} {step + 1}\n")
    if rank == 0:
        (folder / "final.txt").write_text(digest(model, optimizer))
    holdfast.hard_exit()


def wait_for_notice(ckpt: holdfast.Checkpointer) -> None:
    """Pause until a preemption notice arrives, and report durable saves meanwhile, as steps do."""
    while ckpt._training._watching.stop_reason() is None:
        ckpt._training.attempt.saves.settle()
        time.sleep(0.005)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all weights and moments."""
    found = hashlib.sha256()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*model.state_dict().values(), *moments]:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
