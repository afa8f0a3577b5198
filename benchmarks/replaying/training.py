"""The replayed training: `python training.py FOLDER TOOL --every N`, on as many ranks as the job has nodes.

A network of 1.1 million parameters with AdamW (13 MB with its state) learns a fixed function. Gradients are
averaged over gloo. Each step takes 50 ms at least, as on an accelerator: what the processor has not needed is
slept. Rank 0 writes each completed step with its time, and the moments of its start.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

began_unix_s = float(os.environ.get("HOLDFAST_BEGAN_UNIX_S", time.time()))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from replaying.tools.contract import Tool, Training  # noqa: E402

imported_unix_s = time.time()

STEP_S = 0.05
TOTAL = 1_000_000
TOOLS = {
    "holdfast": "with_holdfast.WithHoldfast",
    "standby": "with_holdfast.WithStandby",
    "torch.save": "torch_save.TorchSave",
    "dcp": "dcp_async.DcpAsync",
    "ravex": "with_ravex.WithRavex",
    "none": "without.Without",
}


def tool_class(name: str) -> type[Tool]:
    """Import and return a tool."""
    module, _, attribute = TOOLS[name].rpartition(".")
    return getattr(importlib.import_module(f"replaying.tools.{module}"), attribute)


def main() -> None:
    """Train, until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--steps", type=int, default=TOTAL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    join()
    joined_unix_s = time.time()
    torch.manual_seed(0)
    width = 512
    hidden = [one for _ in range(3) for one in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    made_unix_s = time.time()
    training = Training(model, optimizer, options.folder, options.every)
    attempt = os.environ.get("HOLDFAST_ATTEMPT", "1")
    if training.rank == 0:
        moments = (began_unix_s, imported_unix_s, joined_unix_s, made_unix_s)
        (options.folder / f"start-{attempt}").write_text(" ".join(f"{moment:.6f}" for moment in moments))
    log = (options.folder / f"steps-{attempt}").open("a")

    def take_step(step: int) -> None:
        begin_s = time.monotonic()
        train(training, step)
        time.sleep(max(0.0, begin_s + STEP_S - time.monotonic()))
        if training.rank == 0:
            log.write(f"{step + 1} {time.time():.6f}\n")
            log.flush()

    tool_class(options.tool)(training).run(options.steps, take_step)
    os._exit(0)


def join() -> None:
    """Join the ranks of the job's nodes."""
    address = os.environ["SKYPILOT_NODE_IPS"].splitlines()[0]
    rank, world_size = int(os.environ["SKYPILOT_NODE_RANK"]), int(os.environ["SKYPILOT_NUM_NODES"])
    port = os.environ.get("MASTER_PORT")
    where = f"tcp://{address}:{port}" if port else f"file://{os.environ['HOLDFAST_PROGRESS']}.store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)


def train(training: Training, step: int) -> None:
    """Take one step, and check that the restored state is that of this step.

    Raises:
        RuntimeError: it is not.
    """
    optimizer = training.optimizer
    if counts := {int(state["step"]) for state in optimizer.state.values()} - {step}:
        raise RuntimeError(f"resumed at step {step} with the state of {counts}")
    random = torch.Generator().manual_seed(step * dist.get_world_size() + training.rank)
    inputs = torch.randn(16, 512, generator=random)
    optimizer.zero_grad()
    (training.model(inputs) - inputs.sin()).square().mean().backward()
    gradients = [one.grad for one in training.model.parameters() if one.grad is not None]
    flat = torch.cat([one.flatten() for one in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    optimizer.step()


if __name__ == "__main__":
    main()
