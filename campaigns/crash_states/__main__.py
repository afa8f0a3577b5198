"""Entry of `make crash-states`: records workloads, explores their crash states, and counts what fails."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import repeat
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
_RECORDINGS = 3  # strace does not order two calls of threads that append to one file at the same moment


def main() -> int:
    """Run the command; return 1 if anything failed."""
    options = _options()
    chosen = [one for one in WORKLOADS if not options.workload or one.name in options.workload]
    if options.state:
        return _check_one(chosen[0], options)
    began = time.monotonic()
    with _folder(options.recordings) as folder:
        recorded = _record(chosen, folder)
        outcomes = [_explore(one, options) for one in recorded]
    if not options.workload:
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
        "--resumed", type=float, default=0.01, help="share of states that a process resumes from"
    )
    parser.add_argument("--recordings", type=Path, help="folder of recordings: kept, and used again if there")
    parser.add_argument("--state", help="check this one state, as a failure shows it")
    parser.add_argument("--make", type=Path, help="with --state: leave the state in this folder, unchecked")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    return parser.parse_args()


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Return the folder of recordings; a temporary one is removed afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-crash-") as folder:
        yield Path(folder)


def _record(workloads: Sequence[Workload], folder: Path) -> list[Recording]:
    """Record workloads, two at a time: they mostly wait for fsyncs. No thread is left when workers fork."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(_recorded, workloads, repeat(folder)))


def _explore(recording: Recording, options: argparse.Namespace) -> Outcome:
    log = recording.read()
    with _bar() as progress:
        task = progress.add_task(recording.workload.name, total=options.states)
        found = explore(
            recording,
            log,
            num_states=options.states,
            seed=options.seed,
            num_workers=options.workers,
            limit_s=options.seconds,
            resumed_share=options.resumed,
            on_checked=lambda: progress.advance(task),
        )
    summary = f"{found.name}: {found.num_distinct:,} states, {found.num_failed} failed, {found.seconds:.0f} s"
    print(summary, file=sys.stderr, flush=True)
    return found


def _recorded(workload: Workload, folder: Path) -> Recording:
    place = folder / workload.name.replace(" ", "-")
    found = Recording(workload, place.resolve())
    if (place / "trace.txt").exists():
        return found
    for _ in range(_RECORDINGS - 1):
        made = recordings.make(workload, place)
        try:
            made.read()
        except ValueError as error:
            print(f"{workload.name} is recorded again: {error}", file=sys.stderr)
            shutil.rmtree(place)
        else:
            return made
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
    drawn = f"{one.num_drawn:,} drawn" + ("; no others are found" if one.is_exhausted else "")
    resumed = f"a process resumed from {one.num_resumed:,} of them and saved on top"
    detail = f"{drawn}; {resumed}" if one.num_resumed else drawn
    return counts.Count(one.name, one.num_distinct, one.num_failed, detail)


if __name__ == "__main__":
    sys.exit(main())
