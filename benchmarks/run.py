"""Measure saving and loading, against the machine's limits and the peers, interleaved over several rounds."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import columns
import machine
from goals import judge
from peers import PEERS
from results import Results, Run
from rich.console import Console
from rich.table import Table
from worker import in_short, measure_alone

HERE = Path(__file__).resolve().parent
STATES = ("gpt2-124m", "gpt2-355m", "small-8000", "tiny")
TRAINED = ("gpt2-124m", "tiny")
# markup would take [least..greatest] for a tag; a log file has no width of its own
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 220)


def main() -> int:
    """Run everything that the command line asks for; exit status 1 if a goal is missed."""
    options = _options()
    directory = options.dir.resolve() / f"run-{os.getpid()}"
    directory.mkdir(parents=True)
    facts = machine.describe(directory)
    runs: list[Run] = []
    try:
        _measure_all(options, directory, runs)
    except KeyboardInterrupt:
        console.print("interrupted; what was measured until now is kept")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    results = Results(tuple(runs))
    _write(options.out, facts, results, options)
    return _show(results, facts, options.rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 rounds, fewer training spans, no 355M state")
    parser.add_argument("--states", nargs="+", choices=STATES)
    parser.add_argument("--contestants", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, help="default 5, or 2 with --quick")
    parser.add_argument("--pairs", type=int, help="training spans with and without a save; default 2, or 1")
    parser.add_argument(
        "--dir", type=Path, default=HERE.parent / ".bench", help="where checkpoints are written"
    )
    parser.add_argument("--out", type=Path, help="default results/saving[-quick]_<hardware>_<date>.json")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.pairs = options.pairs or (1 if options.quick else 2)
    if options.states is None:
        options.states = ["gpt2-124m", *([] if options.quick else ["gpt2-355m"]), "small-8000"]
    return options


def _measure_all(options: argparse.Namespace, directory: Path, runs: list[Run]) -> None:
    contestants = ["limits", *options.contestants]
    for number in range(options.rounds):
        for state in options.states:
            pairs = options.pairs if state in TRAINED else 0
            # each round begins with another one, so that none always follows the same neighbour
            shift = number % len(contestants)
            for name in contestants[shift:] + contestants[:shift]:
                runs.append(measure_alone(name, state, number, directory, pairs=pairs))
                console.print(in_short(runs[-1]))
    runs.sort(key=lambda run: (run["round"], contestants.index(run["contestant"])))


def _write(out: Path | None, facts: dict[str, Any], results: Results, options: argparse.Namespace) -> None:
    what = "saving-quick" if options.quick else "saving"
    path = out or HERE / "results" / f"{what}_{machine.slug(facts)}_{facts['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts["load_after"] = os.getloadavg()[0]
    document = {
        "machine": facts,
        "rounds": options.rounds,
        "quick": options.quick,
        "goals": [columns.verdict(found) for found in judge(results)],
        "runs": results.runs,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"wrote {path}")


def _show(results: Results, facts: dict[str, Any], rounds: int) -> int:
    console.print(columns.facts(facts, rounds))
    for state in results.states():
        table = Table("", *(column.heading for column in columns.COLUMNS), title=state)
        for row in columns.rows(results, state):
            table.add_row(*row)
        console.print(table)
        console.print(columns.limits(results, state))
    verdicts = [columns.verdict(found) for found in judge(results)]
    table = Table("goal", "bound", "found", "", title="goals")
    for row in verdicts:
        table.add_row(*row, style="red" if row[-1] == "FAIL" else None)
    console.print(table)
    return int(any(row[-1] == "FAIL" for row in verdicts))


if __name__ == "__main__":
    sys.exit(main())
