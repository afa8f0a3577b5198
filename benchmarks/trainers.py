"""Time for which saves block a training in each framework, without and with Holdfast's adapter.

Every method trains the same model in a process of its own and saves after some steps. Rounds alternate.
A framework that is not installed is left out: `pip install 'torch-holdfast[lightning]'` adds one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from frameworks import FRAMEWORKS, methods_of
from frameworks.contract import Blocked, Training
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)


def main() -> None:
    """Measure every framework that is installed, and write the results."""
    options = _options()
    if options.child:
        _child(options)
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(options.dir)
    facts["packages"] |= {module: machine.version(module) for module in FRAMEWORKS.values()}
    runs = []
    for turn in range(options.rounds):
        for name in options.trainers:
            titles = list(methods_of(name))
            for title in titles[turn % len(titles) :] + titles[: turn % len(titles)]:
                runs.append(_measure(options, name, title))
                _show_last(runs[-1])
    options.dir.rmdir()
    document = {"machine": facts, "rounds": options.rounds, "runs": runs}
    path = options.out or machine.results_path("trainers", facts)
    path.write_text(json.dumps(document, indent=1) + "\n")
    table = Table(*HEADINGS, title="Time for which a save blocks training")
    for row in rows(runs):
        table.add_row(*row)
    console.print(table)
    console.print(f"wrote {path}")


MODULES = [module for module in FRAMEWORKS.values() if module not in ("holdfast", "torch")]
HEADINGS = ("trainer", "saves by", "the call", "longest", "waits later", "together")


def rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The cells of the table: a line for each method, in milliseconds; medians of all saves."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["trainer"], run["method"]), []).append(run)
    lines = []
    for (trainer, method), several in sorted(
        found.items(), key=lambda item: list(FRAMEWORKS).index(item[0][0])
    ):
        calls_ms = [1000 * call for run in several for call in run["calls_s"]]
        wait_ms = statistics.median(1000 * run["wait_s"] for run in several)
        call_ms = statistics.median(calls_ms)
        numbers = (call_ms, max(calls_ms), wait_ms, call_ms + wait_ms)
        lines.append([trainer, method, *(f"{number:.0f} ms" for number in numbers)])
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    there = [name for name, module in FRAMEWORKS.items() if importlib.util.find_spec(module)]
    parser.add_argument("--trainers", nargs="+", choices=list(FRAMEWORKS), default=there)
    parser.add_argument("--layers", type=int, default=24, help="of 12.6 MB with their optimizer state")
    parser.add_argument("--saves", type=int, default=5, help="in each process; the first does not count")
    parser.add_argument("--every", type=int, default=20, help="training steps between saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench" / "trainers")
    parser.add_argument("--out", type=Path, help="default results/trainers_<hardware>_<date>.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace, trainer: str, method: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "saves", "every")]
        command = [sys.executable, __file__, f"--dir={folder}", *sizes, "--child", trainer, method]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("BLOCKED ")]
    if done.returncode or not lines:
        raise SystemExit(f"{trainer}, {method} failed:\n{done.stderr}")
    return {"trainer": trainer, "method": method, **json.loads(lines[0].removeprefix("BLOCKED "))}


def _child(options: argparse.Namespace) -> None:
    trainer, method = options.child
    training = Training(options.dir, options.layers, options.saves, options.every)
    blocked = Blocked()
    blocked.watch_waits()
    methods_of(trainer)[method](training, blocked)
    # The first save prepares memory, files and processes. Some trainers save again at their end.
    calls_s = blocked.calls_s[1 : options.saves]
    wait_s = sum(blocked.waits_s) / options.saves
    result = {"calls_s": calls_s, "wait_s": wait_s, "state_bytes": training.state_bytes}
    print("BLOCKED", json.dumps(result), flush=True)


def _show_last(run: dict[str, Any]) -> None:
    calls_ms = ", ".join(f"{1000 * call:.0f}" for call in run["calls_s"])
    console.print(f"{run['trainer']}, {run['method']}: {calls_ms} ms; waited {1000 * run['wait_s']:.0f} ms")


if __name__ == "__main__":
    main()
