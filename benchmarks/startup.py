"""Start of the command line: `holdfast --help` and `holdfast ls` compared with an empty Python program."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
GOAL_S = 0.15
"""Goal of the time that a command takes beyond an empty Python program."""
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure both commands, and return 1 if one misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="default results/startup_<hardware>_<date>.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        make_home(home)
        run_main = "import sys; from holdfast.cli import main; sys.exit(main())"
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "holdfast --help": [sys.executable, "-c", run_main, "--help"],
            "holdfast ls": [sys.executable, "-c", run_main, "ls", str(home)],
        }
        runs = [
            {name: _seconds(words) for name, words in commands.items()} for _ in range(options.rounds + 1)
        ]
    return _report(options, list(commands), runs[1:])  # the first round fills the page cache


def make_home(home: Path) -> None:
    """Make a home with a few small checkpoints, in a process of its own."""
    code = (
        "import sys, torch, holdfast\n"
        "state = {'w': torch.zeros(10)}\n"
        "with holdfast.Checkpointer(sys.argv[1], state, keep=5, quiet=True) as ckpt:\n"
        "    for step in range(1, 6): ckpt.save(step).wait_durable()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(home)], check=True)


def _seconds(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def _report(options: argparse.Namespace, names: list[str], runs: list[dict[str, float]]) -> int:
    empty, *measured = names
    extra = {name: statistics.median(run[name] - run[empty] for run in runs) for name in measured}
    table = Table("", "median s", "least s", "beyond an empty program s", title="Start of the command line")
    for name in names:
        values = [run[name] for run in runs]
        beyond = f"{extra[name]:.3f}" if name in extra else "-"
        table.add_row(name, f"{statistics.median(values):.3f}", f"{min(values):.3f}", beyond)
    console.print(table)
    facts = machine.describe(HERE)
    path = options.out or machine.results_path("startup", facts)
    path.write_text(json.dumps({"machine": facts, "extra_s": extra, "runs": runs}, indent=1) + "\n")
    console.print(f"goal: at most {GOAL_S} s beyond an empty program; wrote {path}")
    return int(max(extra.values()) > GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
