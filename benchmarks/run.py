"""Measure saving and loading, against the machine's limits and the peers, interleaved over several rounds."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import columns
import machine
import others
from amounts import Amounts
from goals import OF_SAVING, Measurements, Verdict, judge
from peers import OTHERS, PEERS
from results import Results, Run
from rich.console import Console
from rich.table import Table
from worker import in_short, measure_alone

HERE = Path(__file__).resolve().parent
STATES = ("gpt2-124m", "gpt2-355m", "small-8000", "tiny")
TRAINED = ("gpt2-124m", "tiny")
JUDGED = "holdfast"
FIRST = (JUDGED, "torch-save")
"""Contestants whose numbers are in the goals."""
PEER_COMPARED = 6
"""Saves of a peer in a training: the fewest that have an interval of 95 %."""
# markup would take [least..greatest] for a tag; a log file has no width of its own
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 220)


def main() -> int:
    """Run everything that the command line asks for; exit status 1 if a goal is missed."""
    options = _options()
    if options.others:
        others.run(options)
        return 0
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
    parser.add_argument("--quick", action="store_true", help="1 round, few comparisons, no 355M state")
    parser.add_argument("--long", action="store_true", help="every peer in every round, without a time limit")
    parser.add_argument(
        "--others",
        action="store_true",
        help="engines of other projects, with Holdfast and torch.save: 1 round",
    )
    parser.add_argument(
        "--python", help="interpreter with their packages; default .venv-peers/bin/python, if it exists"
    )
    parser.add_argument("--states", nargs="+", choices=STATES)
    parser.add_argument("--contestants", nargs="+", choices=[*PEERS, *OTHERS])
    parser.add_argument("--rounds", type=int, help="default 2, 5 with --long, 1 with --quick or --others")
    parser.add_argument(
        "--compared", type=int, help="Holdfast's saves in a training; default 16 in each round"
    )
    parser.add_argument(
        "--minutes", type=float, help="start nothing after so many minutes; default 23, none with --long"
    )
    parser.add_argument(
        "--dir", type=Path, default=HERE.parent / ".bench", help="where checkpoints are written"
    )
    parser.add_argument("--out", type=Path, help="default results/saving[-quick]_<hardware>_<date>.json")
    options = parser.parse_args()
    if options.others:
        return options
    options.contestants = options.contestants or list(PEERS)
    options.rounds = options.rounds or (1 if options.quick else 5 if options.long else 2)
    options.compared = options.compared or (6 if options.quick else 16)
    options.minutes = options.minutes or (math.inf if options.long else 23)
    if options.states is None:
        options.states = ["gpt2-124m", *([] if options.quick else ["gpt2-355m"]), "small-8000"]
    return options


def _measure_all(options: argparse.Namespace, directory: Path, runs: list[Run]) -> None:
    order = plan(options.states, options.contestants, options.rounds, has_all_rounds=options.long)
    until_s = time.monotonic() + 60 * options.minutes
    for at, (number, state, name) in enumerate(order):
        if time.monotonic() > until_s:
            left_out = ", ".join(f"{left} ({size})" for _, size, left in order[at:])
            console.print(f"no time left for {left_out}; --long has no limit")
            break
        is_judged = name == JUDGED
        compared = options.compared if is_judged else PEER_COMPARED
        runs.append(
            measure_alone(
                name,
                state,
                number,
                directory,
                amounts=Amounts(
                    compared=compared if state in TRAINED else 0,
                    loads=3 if is_judged or options.long else 1,
                ),
            )
        )
        console.print(in_short(runs[-1]))
    names = ["limits", *options.contestants]
    runs.sort(key=lambda run: (run["round"], names.index(run["contestant"])))


def plan(
    states: list[str], contestants: list[str], rounds: int, *, has_all_rounds: bool
) -> list[tuple[int, str, str]]:
    """Return the order of measurements: round, state and contestant, the most important first.

    Every round begins with another contestant, so that none always follows the same neighbour.

    Args:
        has_all_rounds: every contestant takes part in every round. Otherwise the rounds are for Holdfast and
            the limits, and the others follow after the first round, once for each state.
    """
    judged = [name for name in contestants if name in FIRST]
    peers = [name for name in contestants if name not in FIRST]
    found = []
    for number in range(rounds):
        names = ["limits", *judged, *(peers if has_all_rounds else ())]
        shift = number % len(names)
        found += [(number, state, name) for state in states for name in names[shift:] + names[:shift]]
        if number == 0 and not has_all_rounds:
            found += [(0, state, name) for state in states for name in peers]
    return found


def _write(out: Path | None, facts: dict[str, Any], results: Results, options: argparse.Namespace) -> None:
    what = "saving-quick" if options.quick else "saving"
    path = out or machine.results_path(what, facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts["load_after"] = os.getloadavg()[0]
    document = {
        "machine": facts,
        "rounds": options.rounds,
        "quick": options.quick,
        "goals": [columns.verdict(found) for found in _judge(results, facts)],
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
    verdicts = _judge(results, facts)
    table = Table("goal", "bound", "found", "measured", "", title="goals")
    for found in verdicts:
        table.add_row(*columns.verdict(found), style="red" if found.passed is False else None)
    console.print(table)
    return int(any(found.passed is False for found in verdicts))


def _judge(results: Results, facts: dict[str, Any]) -> list[Verdict]:
    """Return the goals of the measured states."""
    measurements = Measurements({"saving": [{"machine": facts, "runs": results.runs}]})
    return [found for found in judge(measurements, OF_SAVING) if found.found is not None]


if __name__ == "__main__":
    sys.exit(main())
