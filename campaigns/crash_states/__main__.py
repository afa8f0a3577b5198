"""Entry of `make crash-states`: records workloads, explores their crash states, and counts what fails."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from campaigns import counts
from campaigns.crash_states import recording as recordings
from campaigns.crash_states.explorer import Outcome, check_state, explore, from_json
from campaigns.crash_states.recording import Recording
from campaigns.crash_states.workloads import WORKLOADS, Workload

DEFAULT_STATES = 2500


def main() -> int:
    """Run the command; return 1 if anything failed."""
    options = _options()
    chosen = [one for one in WORKLOADS if not options.workload or one.name in options.workload]
    if options.state:
        return _check_one(chosen[0], options)
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for workload in chosen:
        outcomes.append(_explore(workload, options))
        if not options.workload:  # after each, so that a run that is stopped has counted something
            counts.write("crash_states", [_count(one) for one in outcomes], seconds=time.monotonic() - began)
    if options.json:
        print(json.dumps([asdict(one) for one in outcomes], indent=2))
    else:
        _print(outcomes)
    return int(any(one.num_failed for one in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaigns.crash_states", description=__doc__)
    names = [one.name for one in WORKLOADS]
    parser.add_argument(
        "--workload", action="append", choices=names, help="explore only this one (repeatable)"
    )
    parser.add_argument("--states", type=int, default=DEFAULT_STATES, help="most states of each workload")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="most time for each workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--resumed", type=float, default=0.02, help="share of states that a process resumes from"
    )
    parser.add_argument("--recordings", type=Path, help="folder of recordings: kept, and used again if there")
    parser.add_argument("--state", help="check this one state, as a failure shows it")
    parser.add_argument("--make", type=Path, help="with --state: leave the state in this folder, unchecked")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    return parser.parse_args()


def _explore(workload: Workload, options: argparse.Namespace) -> Outcome:
    folder = options.recordings or Path(tempfile.mkdtemp(prefix="holdfast-crash-"))
    try:
        recording = _recorded(workload, folder)
        log = recording.read()
        with _bar() as progress:
            task = progress.add_task(workload.name, total=options.states)
            return explore(
                recording,
                log,
                num_states=options.states,
                seed=options.seed,
                num_workers=options.workers,
                limit_s=options.seconds,
                resumed_share=options.resumed,
                on_checked=lambda: progress.advance(task),
            )
    finally:
        if options.recordings is None:
            shutil.rmtree(folder)


def _recorded(workload: Workload, folder: Path) -> Recording:
    place = folder / workload.name.replace(" ", "-")
    found = Recording(workload, place.resolve())
    if (place / "trace.txt").exists():
        return found
    return recordings.make(workload, place)


def _check_one(workload: Workload, options: argparse.Namespace) -> int:
    recording = _recorded(workload, options.recordings)
    log = recording.read()
    state = from_json(options.state)
    if options.make:
        from campaigns.crash_states.explorer import make

        make(log, state, options.make)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="holdfast-state-"))
    problems = check_state(log, recording, state, folder, is_resumed=workload.restores)
    print("\n".join(problems) or "Everything holds.")
    return int(bool(problems))


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _print(outcomes: list[Outcome]) -> None:
    table = Table(box=None)
    for heading in ("workload", "calls", "drawn", "distinct", "resumed", "failed", "seconds"):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for one in outcomes:
        numbers = one.num_calls, one.num_drawn, one.num_distinct, one.num_resumed, one.num_failed
        table.add_row(one.name, *(f"{number:,}" for number in numbers), f"{one.seconds:.0f}")
    Console().print(table)
    for one in outcomes:
        for failure in one.failures:
            print(f"\n{one.name} ({failure.rule}): {failure.problem}")
            print(f"  --workload '{one.name}' --state '{failure.state}'")


def _count(one: Outcome) -> counts.Count:
    detail = f"{one.num_drawn:,} drawn; a process resumed from {one.num_resumed:,} of them and saved on top"
    return counts.Count(one.name, one.num_distinct, one.num_failed, detail)


if __name__ == "__main__":
    sys.exit(main())
