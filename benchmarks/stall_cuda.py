"""The same measurement for a state on a CUDA device: what the call blocks and what a save costs training."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import columns
import machine
import torch
from results import Results, Run
from rich.console import Console
from rich.table import Table
from worker import in_short, measure_alone

HERE = Path(__file__).resolve().parent
CONTESTANTS = ("limits", "holdfast", "torch-save", "dcp-staged", "torch-checkpointing-async")
# markup would take [least..greatest] for a tag; a log file has no width of its own
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 220)


def main() -> int:
    """Run on the first CUDA device, if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--states", nargs="+", default=["gpt2-124m"], choices=["gpt2-124m", "gpt2-355m", "tiny"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=HERE.parent / ".bench", help="where checkpoints are written"
    )
    parser.add_argument("--out", type=Path, help="results file; default results/stall_<gpu>_<date>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        console.print("no CUDA device")
        return 0
    directory = options.dir.resolve() / f"run-{os.getpid()}"
    directory.mkdir(parents=True)
    facts = machine.describe(directory) | {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    try:
        results = _measure_all(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    gpu = facts["gpu"].lower().replace(" ", "-")
    path = options.out or HERE / "results" / f"stall_{gpu}_{facts['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": facts, "rounds": options.rounds, "device": "cuda", "runs": results.runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    _show(results, f"{facts['gpu']}; {columns.facts(facts, options.rounds)}")
    return 0


def _measure_all(options: argparse.Namespace, directory: Path) -> Results:
    runs: list[Run] = []
    for number in range(options.rounds):
        for state in options.states:
            shift = number % len(CONTESTANTS)
            for name in CONTESTANTS[shift:] + CONTESTANTS[:shift]:
                runs.append(measure_alone(name, state, number, directory, pairs=2, device="cuda"))
                console.print(in_short(runs[-1]))
    runs.sort(key=lambda run: (run["round"], CONTESTANTS.index(run["contestant"])))
    return Results(tuple(runs))


def _show(results: Results, title: str) -> None:
    console.print(title)
    for state in results.states():
        table = Table("", *(column.heading for column in columns.COLUMNS), title=f"{state} on CUDA")
        for row in columns.rows(results, state):
            table.add_row(*row)
        console.print(table)
        console.print(columns.limits(results, state))


if __name__ == "__main__":
    sys.exit(main())
