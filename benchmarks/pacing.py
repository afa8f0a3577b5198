"""Cost of comparing the ranks: samples in the trainers, and the windows of the keepers."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import machine
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import holdfast

HERE = Path(__file__).resolve().parent
GOAL = 0.005
"""Goal of the processor time, as a share of one processor."""
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure, and return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=45.0, help="training of two ranks, per round")
    parser.add_argument("--out", type=Path, help="default results/pacing_<hardware>_<date>.json")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"off": [], "report": []}
    for _ in range(options.rounds):
        for action, rows in found.items():
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_train, (action, options.seconds, folder), nprocs=2)  # pyright: ignore[reportPrivateImportUsage, reportUnknownMemberType]
                rows.append(json.loads(Path(folder, "result").read_text()))
    return _report(options, found)


def _train(rank: int, action: str, seconds: float, folder: str) -> None:
    """Train one rank, and write down the shares of a processor that its sampler and its keeper used."""
    torch.set_num_threads(1)
    store = f"file://{folder}/meeting"
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(f"{folder}/home", state, every=10**9, on_slow=action, quiet=True) as ckpt:
        keeper, began, before, end = None, 0.0, (0.0, 0.0), torch.zeros(1)
        for step in ckpt.steps(10**9):
            model(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 20:
                (keeper,) = psutil.Process(os.getpid()).children()
                began, before = time.perf_counter(), (_sampler_s(), sum(keeper.cpu_times()[:2]))
            if step % 20 == 0 and step > 20:
                end[0] = float(time.perf_counter() - began > seconds)
                dist.broadcast(end, 0)
                if end:
                    break
        assert keeper is not None
        took_s = time.perf_counter() - began
        result = {
            "trainer": (_sampler_s() - before[0]) / took_s,
            "keeper": (sum(keeper.cpu_times()[:2]) - before[1]) / took_s,
        }
        if rank == 0:
            Path(folder, "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def _sampler_s() -> float:
    """Return the processor time of the thread that samples, in seconds; 0 without one."""
    for thread in threading.enumerate():
        if thread.name == "holdfast-pace":
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            return int(text.split()[0]) / 1e9
    return 0.0


def _report(options: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> int:
    trainer = statistics.median(row["trainer"] for row in found["report"])
    on, off = (statistics.median(row["keeper"] for row in found[one]) for one in ("report", "off"))
    share = trainer + max(0.0, on - off)
    table = Table("", "share of one processor")
    table.add_row("samples, in each trainer", f"{trainer:.3%}")
    table.add_row("keeper of rank 0, more than without", f"{on - off:.3%}")
    console.print(table)
    facts: dict[str, Any] = machine.describe(HERE)
    path = options.out or HERE / "results" / f"pacing_{machine.slug(facts)}_{facts['date'][:10]}.json"
    path.write_text(json.dumps({"machine": facts, "rounds": found, "share": share}, indent=1) + "\n")
    console.print(f"goal: at most {GOAL:.1%}; wrote {path}")
    return int(share > GOAL)


if __name__ == "__main__":
    sys.exit(main())
