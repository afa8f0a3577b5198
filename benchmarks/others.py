"""The measurement of engines of other projects, beside Holdfast, `torch.save` and the limits."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import columns
import engines
import machine
from amounts import Amounts
from peers import OTHERS
from results import Results, Run
from rich.console import Console
from rich.table import Table
from worker import in_short, measure_alone

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / ".venv-peers" / "bin" / "python"
BESIDE = ("holdfast", "torch-save")
"""Contestants of the default run that are measured in the same minutes."""
STATES = ("gpt2-124m",)
COMPARED = 2
"""Saves of each engine in a training: few, so that all of them take 20 minutes."""
MINUTES = 20.0
LIMIT_S = 300.0
"""Limit for one engine: the slowest that works takes a third of it."""
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 80)


def run(options: argparse.Namespace) -> None:
    """Measure what the options of `run.py` name, and write and print the results."""
    python = options.python or (str(ENVIRONMENT) if ENVIRONMENT.exists() else sys.executable)
    names = options.contestants or [*BESIDE, *OTHERS]
    rounds = options.rounds or 1
    states = options.states or STATES
    directory = options.dir.resolve() / f"run-{os.getpid()}"
    directory.mkdir(parents=True)
    facts = machine.describe(directory)
    facts["packages"] |= _versions(python, facts["packages"])
    runs: list[Run] = []
    order = [
        (number, state, name) for number in range(rounds) for state in states for name in ["limits", *names]
    ]
    until_s = time.monotonic() + 60 * (options.minutes or MINUTES)
    try:
        for at, (number, state, name) in enumerate(order):
            if time.monotonic() > until_s:
                console.print(
                    f"no time left for {', '.join(left for _, _, left in order[at:])}; see --minutes"
                )
                break
            compared = options.compared if options.compared is not None else COMPARED
            runs.append(
                measure_alone(
                    name,
                    state,
                    number,
                    directory,
                    amounts=Amounts(compared=compared, loads=1),
                    is_others=True,
                    python=python,
                    limit_s=LIMIT_S,
                )
            )
            console.print(in_short(runs[-1]))
    except KeyboardInterrupt:
        console.print("interrupted; the measurements so far are kept")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _write(options.out, facts, rounds, runs)
    _show(Results(tuple(runs)))


def _versions(python: str, names: dict[str, Any]) -> dict[str, str]:
    """Return the versions of packages in another interpreter's environment."""
    found = "{one.name: one.version for one in importlib.metadata.distributions()}"
    program = f"import importlib.metadata, json; print(json.dumps({found}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    installed = json.loads(done.stdout)
    return {name: installed[name] for name in names if name in installed}


def _write(out: Path | None, facts: dict[str, Any], rounds: int, runs: list[Run]) -> None:
    path = out or machine.results_path("engines", facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts["load_after"] = os.getloadavg()[0]
    path.write_text(json.dumps({"machine": facts, "rounds": rounds, "runs": runs}, indent=1) + "\n")
    console.print(f"wrote {path}")


def _show(results: Results) -> None:
    for state in results.states():
        table = Table("", *engines.HEADINGS_IN_SHORT, title=state)
        for row in engines.rows_in_short(results, state):
            table.add_row(*row)
        console.print(table)
        console.print(columns.limits(results, state))
    console.print("All columns, with their ranges: benchmarks/table.py benchmarks/RESULTS.md")
