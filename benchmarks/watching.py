"""Cost of watching for hangs: processor time of a step, and of the keeper, with and without it."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
GOAL = 0.005
"""Goal of the processor time, as a share of that of the training."""
STEPS = 2000
ACTIONS = ("off", "report")
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure, and return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="default results/watching_<hardware>_<date>.json")
    parser.add_argument("--train", choices=ACTIONS, help="measure one training, in this process")
    options = parser.parse_args()
    if options.train:
        print(json.dumps(_train(options.train)))
        return 0
    runs = [{action: _run(action) for action in ACTIONS} for _ in range(options.rounds)]
    return _report(options, runs)


def _run(action: str) -> dict[str, float]:
    command = [sys.executable, str(HERE / "watching.py"), "--train", action]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _train(action: str) -> dict[str, float]:
    """Train a small model, and return processor times in seconds."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(256, 256)
    state = {"model": model, "optimizer": optimizer}
    times: list[tuple[float, float, float]] = []
    with (
        tempfile.TemporaryDirectory() as home,
        holdfast.Checkpointer(home, state, every=10**9, on_hang=action, quiet=True) as ckpt,
    ):
        for step in ckpt.steps(STEPS + 101):
            if step in (100, STEPS + 100):  # it is warm; the end
                keeper = psutil.Process(os.getpid()).children()[0]
                times.append((_own_s(), sum(keeper.cpu_times()[:2]), time.perf_counter()))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    own_s, keeper_s, wall_s = (after - before for before, after in zip(*times, strict=True))
    return {"training_s": own_s, "keeper_s": keeper_s, "wall_s": wall_s}


def _own_s() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def _report(options: argparse.Namespace, runs: list[dict[str, dict[str, float]]]) -> int:
    medians = {
        action: {key: statistics.median(run[action][key] for run in runs) for key in runs[0][action]}
        for action in ACTIONS
    }
    table = Table("on_hang", "step, processor time", "keeper, of one processor")
    for action, one in medians.items():
        of_wall = one["keeper_s"] / one["wall_s"]
        table.add_row(action, f"{1e6 * one['training_s'] / STEPS:.1f} us", f"{of_wall:.2%}")
    console.print(table)
    more_s = statistics.median(run["report"]["training_s"] - run["off"]["training_s"] for run in runs)
    share = more_s / medians["off"]["training_s"]
    keeper = (medians["report"]["keeper_s"] - medians["off"]["keeper_s"]) / medians["off"]["training_s"]
    found = f"more per step: {1e6 * more_s / STEPS:.2f} us ({share:+.2%}); keeper {keeper:+.2%}"
    console.print(f"{found}; goal: at most {GOAL:.1%} in all")
    facts = machine.describe(HERE)
    path = options.out or HERE / "results" / f"watching_{machine.slug(facts)}_{facts['date'][:10]}.json"
    document = {"machine": facts, "steps": STEPS, "share": share, "keeper": keeper, "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}")
    return int(max(share, 0.0) + max(keeper, 0.0) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
