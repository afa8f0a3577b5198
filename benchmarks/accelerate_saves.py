"""Time that saves take from a loop with Hugging Face Accelerate, stock and attached, in one process.

python -m benchmarks.accelerate_saves [--layers 4] [--width 1024] [--saves 6]

Both train the same model from the same seed, in turns. Blocked is the time in `save_state`, and for Holdfast
also the time for which the optimizer waited for the copy. Needs the extra `accelerate`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from holdfast.adapters.accelerate import attach


def run(args: argparse.Namespace, folder: Path, *, attached: bool) -> tuple[list[float], float]:
    """Train once; return the blocked seconds of each save, and those that the optimizer waited in all."""
    torch.manual_seed(0)
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator: Any = Accelerator(cpu=True, project_config=config)
    if attached:
        attach(accelerator, quiet=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(args.width, args.width) for _ in range(args.layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    blocked_s: list[float] = []
    for step in range(1, args.saves * args.every + 1):
        accelerator.backward(model(torch.ones(4, args.width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            began = time.perf_counter()
            accelerator.save_state()
            blocked_s.append(time.perf_counter() - began)
    waited_s = accelerator.holdfast_session.waited_for_copy_s if attached else 0.0
    accelerator.end_training()
    return blocked_s, waited_s


def main() -> None:
    """Measure both in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    waits: list[float] = []
    for _ in range(args.rounds):
        for attached in (False, True):
            folder = Path(tempfile.mkdtemp(dir=args.folder))
            blocked_s, waited_s = run(args, folder, attached=attached)
            found[attached] += blocked_s[1:]  # the first one prepares memory, files and processes
            if attached:
                waits.append(waited_s / len(blocked_s))
            shutil.rmtree(folder)
    for attached, name in ((False, "stock"), (True, "holdfast")):
        values = sorted(1000 * one for one in found[attached])
        median = statistics.median(values)
        print(f"{name:9} median {median:8.1f} ms   worst {values[-1]:8.1f} ms   of {len(values)} saves")
    print(f"holdfast  optimizer waited {1000 * statistics.mean(waits):.1f} ms per save for the copy")


if __name__ == "__main__":
    main()
