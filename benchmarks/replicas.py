"""Cost of the audit of replicas: saves of a replicated state by two ranks, with it and without, in turns."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from cputime import cpu_s
from rich.console import Console
from rich.table import Table
from torch import nn

import holdfast
from holdfast import Preemption

HERE = Path(__file__).resolve().parent
OFF, AUTO, ALL = "off", "auto", "1"
INTERVAL_S = 60.0
"""Time from save to save, which the share of the training's processor time is computed for."""
GOAL = 0.005
"""Goal of that share."""
WAIT_S = 1200
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure, and return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="per round")
    parser.add_argument("--mib", type=int, default=480, help="size of the state")
    parser.add_argument("--dir", help="folder on the disk that is written to")
    parser.add_argument("--out", type=Path, help="default results/replicas_<hardware>_<date>.json")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, options, answers)) for rank in (0, 1)]
        for one in ranks:
            one.start()
        found = answers.get(timeout=WAIT_S)
        for one in ranks:
            one.join(WAIT_S)
    return _report(options, found)


def _rank(rank: int, folder: str, options: argparse.Namespace, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    width = 1024
    net = nn.Sequential(
        *(nn.Linear(width, width, bias=False) for _ in range((options.mib << 20) // (12 * width**2)))
    )
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, width)).sum().backward()
    optimizer.step()
    found: dict[str, list[dict[str, float]]] = {OFF: [], AUTO: [], ALL: []}
    for number in range(options.rounds + 1):
        for audit in random.Random(number).sample(list(found), len(found)):
            home = f"{folder}/{number}-{audit}"
            found[audit].append(_save(home, {"net": net, "optimizer": optimizer}, audit, options.saves))
    if rank == 0:
        answers.put({audit: rounds[1:] for audit, rounds in found.items()})  # the first warms up
    dist.barrier()
    dist.destroy_process_group()


def _save(home: str, state: dict[str, Any], audit: str, num_saves: int) -> dict[str, float]:
    """Return the means of one rank's saves: processor time, blocked time, and time until durable."""
    ckpt = holdfast.Checkpointer(
        home,
        state,
        watches=[
            holdfast.Replicas(int(audit) if audit.isdigit() else audit),
            Preemption("none", signals=False),
            holdfast.CompileCache("off"),
        ],
        keep=1,
        quiet=True,
    )
    with ckpt:
        ckpt.save(0).wait_durable()  # touches the arena
        dist.barrier()
        before, saves = cpu_s(), []
        for step in range(1, num_saves + 1):
            saves.append(ckpt.save(step))
            saves[-1].wait_durable()
        used_s = cpu_s() - before
        dist.barrier()
    return {
        "cpu_s": used_s / num_saves,
        "blocked_s": statistics.mean(one.blocked_s for one in saves),
        "staged_s": statistics.mean(one.staged_s or 0.0 for one in saves),
        "durable_s": statistics.mean(one.durable_s or 0.0 for one in saves),
    }


def _report(options: argparse.Namespace, found: dict[str, list[dict[str, float]]]) -> int:
    table = Table("audit", "processor time", "ratio", "blocked", "staged", "durable", "ratio")
    for audit, rounds in found.items():
        pairs = list(zip(rounds, found[OFF], strict=True))
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        table.add_row(
            audit,
            f"{1e3 * medians['cpu_s']:.0f} ms",
            _ratio(pairs, "cpu_s"),
            f"{1e3 * medians['blocked_s']:.1f} ms",
            f"{1e3 * medians['staged_s']:.0f} ms",
            f"{medians['durable_s']:.2f} s",
            _ratio(pairs, "durable_s"),
        )
    console.print(table)
    extra_s = statistics.median(
        one["cpu_s"] - off["cpu_s"] for one, off in zip(found[AUTO], found[OFF], strict=True)
    )
    share = extra_s / INTERVAL_S
    console.print(f"{1e3 * extra_s:.0f} ms a save: {share:.3%} of a processor, with a save every minute")
    facts = machine.describe(HERE)
    path = options.out or machine.results_path("replicas", facts)
    document = {"machine": facts, "mib": options.mib, "rounds": found, "share": share}
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"goal: at most {GOAL:.1%}; wrote {path}")
    return int(share > GOAL)


def _ratio(pairs: list[tuple[dict[str, float], dict[str, float]]], key: str) -> str:
    ratios = [one[key] / off[key] for one, off in pairs]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"


if __name__ == "__main__":
    sys.exit(main())
