"""Saves of 1 to 8 ranks on one host whose keepers share one core: which resource ends first.

Each rank trains a model of its own size with AdamW on the other core, so the ranks' saves are large and the
keepers' core is the only one for hashes, writes and the commit. For each number of ranks, three resources are
compared with their limits while a save is on its way to the disk: the keepers' core, the disk (a raw write of
as many bytes, in turns with the saves) and the memory (a copy by one thread, in the same process).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import limits
import machine
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import holdfast
from holdfast import Preemption

HERE = Path(__file__).resolve().parent
WIDTH = 1024
WAIT_S = 1200
PASSES = 4
"""Times that a byte crosses the memory: read and written by the copy, read by the hash and by the disk."""
RESOURCES = {"core": "the keepers' core", "disk": "the disk", "memory": "the bandwidth of the memory"}
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)

Round = dict[str, float]


def main() -> int:
    """Measure, write the results and show them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5, help="saves that are measured")
    parser.add_argument("--mib", type=int, default=192, help="size of each rank's state")
    parser.add_argument("--dir", help="folder on the disk that is written to")
    parser.add_argument("--out", type=Path, help="default results/crowded_<hardware>_<date>.json")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("at least 2 cores are needed: one for the training, one for the keepers.")
    rows = []
    for world_size in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            rounds = _run(world_size, folder, options)
            rows.append({"ranks": world_size, **_summary(rounds, world_size * options.mib << 20)})
    facts = machine.describe(HERE)
    path = options.out or machine.results_path("crowded", facts)
    path.write_text(json.dumps({"machine": facts, "mib": options.mib, "rows": rows}, indent=1) + "\n")
    _show(rows)
    console.print(f"wrote {path}")
    return 0


def _run(world_size: int, folder: str, options: argparse.Namespace) -> list[Round]:
    """Return the rounds of one number of ranks."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, folder, options, answers))
        for rank in range(world_size)
    ]
    for one in ranks:
        one.start()
    found = answers.get(timeout=WAIT_S)
    for one in ranks:
        one.join(WAIT_S)
    return found


def _rank(rank: int, world_size: int, folder: str, options: argparse.Namespace, answers: Any) -> None:
    *training, keepers = sorted(os.sched_getaffinity(0))
    _pin(os.getpid(), set(training))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    layers = (options.mib << 20) // (12 * WIDTH**2)  # a weight and two moments, of 4 bytes each
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    rounds = []
    watches = [Preemption("none", signals=False), holdfast.Replicas("off"), holdfast.CompileCache("off")]
    with holdfast.Checkpointer(
        f"{folder}/home",
        {f"model-{rank}": model, f"optimizer-{rank}": optimizer},  # no rank has a tensor of another
        watches=watches,
        every=10**9,
        keep=1,
        quiet=True,
    ) as ckpt:
        _train(model, optimizer)
        ckpt.save(0).wait_durable()
        own = [one.pid for one in psutil.Process().children() if "keeper" in " ".join(one.cmdline())]
        for pid in own:
            _pin(pid, {keepers})
        for step in range(1, options.rounds + 1):
            rounds.append(_round(ckpt, step, model, optimizer, own))
            if rank == 0:
                rounds[-1]["raw_s"] = _raw_write_s(Path(folder), world_size * options.mib << 20)
    gathered: list[list[Round]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, rounds)
    if rank == 0:
        memcpy = _memcpy_bytes_per_s()
        answers.put([_of_all_ranks(those) | {"memcpy": memcpy} for those in zip(*gathered, strict=True)])
    dist.barrier()
    dist.destroy_process_group()


def _pin(pid: int, cores: set[int]) -> None:
    """Keep all threads of a process, and those that it will start, on some cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Take a step, and return its seconds."""
    began = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH)).mean().backward()
    optimizer.step()
    return time.perf_counter() - began


def _round(
    ckpt: Any, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keepers: list[int]
) -> Round:
    """Train until a save is durable, and return its times and those of the keeper."""
    plain_s = statistics.median(_train(model, optimizer) for _ in range(5))
    dist.barrier()
    before, began = _processor_s(keepers), time.perf_counter()
    save = ckpt.save(step)
    steps = []
    while save.durable_s is None:
        steps.append(_train(model, optimizer))
    save.wait_durable()
    used = _processor_s(keepers) - before
    return {
        "blocked_s": save.blocked_s,
        "staged_s": save.staged_s or 0.0,
        "durable_s": save.durable_s or 0.0,
        "whole_s": time.perf_counter() - began,
        "keeper_s": used,
        "slower": statistics.fmean(steps) / plain_s if steps else 1.0,
    }


def _processor_s(pids: list[int]) -> float:
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # as clock_getcpuclockid(3) makes it


def _raw_write_s(folder: Path, num_bytes: int) -> float:
    return limits.write_and_delete(num_bytes, folder, limits.best_write_depth(num_bytes, folder, (1,)))


def _memcpy_bytes_per_s() -> float:
    source, target = torch.ones(1 << 26), torch.zeros(1 << 26)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return source.nbytes / min(seconds)


def _of_all_ranks(ranks: tuple[Round, ...]) -> Round:
    """Return a round of the whole host: processor time of all keepers, and times of the slowest rank."""
    whole = {key: max(one[key] for one in ranks) for key in ranks[0] if key != "raw_s"}
    return whole | {"keeper_s": sum(one["keeper_s"] for one in ranks), "raw_s": ranks[0]["raw_s"]}


def _summary(rounds: list[Round], num_bytes: int) -> Round:
    """Return the medians of the rounds, and the shares of three resources that a save uses of its limits.

    The time that counts is the one from `save()` until the save is durable on the slowest rank.
    """
    found = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    during_s = found["durable_s"]
    return found | {
        "num_bytes": num_bytes,
        "core": found["keeper_s"] / during_s,
        "disk": found["raw_s"] / during_s,
        "memory": PASSES * num_bytes / during_s / (2 * found["memcpy"]),  # a copy reads and writes
    }


def _show(rows: list[Round]) -> None:
    headings = ("ranks", "a save", "blocked", "durable", "keepers' core", "disk", "memory", "steps")
    table = Table(*headings, title="share of its limit that each resource reaches during a save")
    for row in rows:
        table.add_row(
            f"{row['ranks']:.0f}",
            f"{row['num_bytes'] / 1e9:.2f} GB",
            f"{1e3 * row['blocked_s']:.1f} ms",
            f"{row['durable_s']:.2f} s",
            *(f"{row[key]:.0%}" for key in RESOURCES),
            f"x {row['slower']:.2f}",
        )
    console.print(table)
    most = rows[-1]
    first = max(RESOURCES, key=lambda key: most[key])
    console.print(f"with {most['ranks']:.0f} ranks the first to end is: {RESOURCES[first]}")


if __name__ == "__main__":
    sys.exit(main())
