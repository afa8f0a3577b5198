"""Trials of a training script for `check` and `replay`: runs that end or are killed, traces, comparison."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store import Store, open_store
from holdfast.cli import print_note
from holdfast.cli.diff import Side, compare
from holdfast.cli.homes import nearest_hint
from holdfast.cli.tables import Column, print_table
from holdfast.errors import InvalidInput
from holdfast.system.environment import TRIAL, WATCH, sandbox_environment
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.linux.processes import end_of, process_group
from holdfast.system.units import parse_duration
from holdfast.watch.report.curves import collect_curves
from holdfast.watch.report.saves import parse_events

_MAX_ROWS = 20


class DifferenceRow(Struct, frozen=True):
    """One tensor or value that differs."""

    key: str
    how: str
    is_tensor: bool = True  # False: a plain value


def open_side(name: str, home: str, step: int, attempt: int | None = None) -> Side:
    """Open a checkpoint for a comparison."""
    store = open_store(home)
    return Side(name, store, open_checkpoint(store, step, attempt=attempt))


def compare_sides(a: Side, b: Side) -> tuple[list[DifferenceRow], int]:
    """Return the differences of the checkpoints of two runs, and the number of values compared."""
    found = compare(a, b)
    rows = [DifferenceRow(key, f"only in {a.name}") for key in found.only_a]
    rows += [DifferenceRow(key, f"only in {b.name}") for key in found.only_b]
    for change in found.changed:
        apart = "" if change.max_abs is None else f", up to {change.max_abs:.2g} apart"
        rows.append(DifferenceRow(change.name, f"{change.num_changed} of {change.num_items} numbers{apart}"))
    values = ((key, f"{a or 'nothing'} and {b or 'nothing'}") for key, a, b in found.values)
    rows += [DifferenceRow(key, how, is_tensor=False) for key, how in values]
    return rows, found.num_compared + len(a.checkpoint.values())


def print_rows(rows: Sequence[dict[str, str]]) -> None:
    """Print the first rows as a table."""
    columns = Column("KEY", itemgetter("key"), "name"), Column("DIFFERENCE", itemgetter("how"), "text")
    print_table(columns, rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        print(f"and {len(rows) - _MAX_ROWS} more; use --json to print all")


class Trace:
    """Trace of all ranks of one trial, as its processes have written it into a folder."""

    def __init__(self, folder: Path) -> None:
        # By rank: completed steps, and digests.
        self.batches: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.generators: dict[str, dict[int, dict[str, str]]] = defaultdict(dict)
        self.doubts: list[dict[str, Any]] = []
        self.saved: list[int] = []
        self.restored: int | None = None
        self.was_killed = self.has_files = False
        for path in sorted(folder.glob("*.jsonl")):
            self.has_files = True
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed process
                    self._add(path.name.split("-")[0], *json.loads(line))

    def _add(self, rank: str, step: int, kind: str, value: Any) -> None:
        if kind == "batch":
            self.batches[rank].append((step, value))
        elif kind == "generators":
            self.generators[rank][step] = value
        elif kind == "doubts":
            self.doubts += [one for one in value if one not in self.doubts]
        elif kind == "saved" and rank == "0":
            self.saved.append(value)
        elif kind == "restored":
            self.restored = value
        elif kind == "killed":
            self.was_killed = True


def recorded_values(store: Store) -> dict[int, dict[str, float]]:
    """Return the metrics that count of a run, by step and name."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for curve in collect_curves(parse_events(read_lines(store)[0])):
        for point in curve.counted:
            found[point.step][curve.name] = point.value
    return found


def recorded_texts(homes: Path) -> dict[str, dict[int, dict[str, str]]]:
    """Return the metrics of the runs in a folder as text, by home, step and name."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for home in newest_steps(homes):
        steps = recorded_values(open_store(os.fspath(homes / home))).items()
        found[home] = {step: {name: repr(x) for name, x in values.items()} for step, values in steps}
    return found


def first_step(
    whole: dict[str, dict[int, dict[str, str]]],
    other: dict[str, dict[int, dict[str, str]]],
    after: int,
    ignored: Collection[str] = (),
) -> tuple[int | None, list[str]]:
    """Return the first step with different values in two traces, later than `after`, and their names."""
    for rank, steps in whole.items():
        for step in sorted(step for step in steps if step > after):
            values, others = steps[step], other.get(rank, {}).get(step)
            if others is None:
                continue
            names = [name for name in values if name not in ignored and values[name] != others.get(name)]
            if names:
                return step, names
    return None, []


def first_batch(whole: Trace, other: Trace, after: int) -> int | None:
    """Return the first step with different batches in two traces, later than `after`."""
    found = []
    for rank, batches in whole.batches.items():
        later = ([pair for pair in pairs if pair[0] >= after] for pairs in (batches, other.batches[rank]))
        found += [step + 1 for (step, digest), (_, its) in zip(*later, strict=False) if digest != its]
    return min(found, default=None)


def unseeded(whole: Trace, other: Trace) -> set[str]:
    """Return the names of the generators that differ between two uninterrupted runs."""
    return {
        name
        for rank, steps in whole.generators.items()
        for step, states in steps.items()
        for name, state in states.items()
        if other.generators.get(rank, {}).get(step, states).get(name) != state
    }


class Trials(Struct):
    """Runs a command several times, one after the other."""

    command: list[str]
    folder: Path
    timeout_s: float  # of each trial
    num_trials: int = 0

    def homes(self, name: str) -> Path:
        """Return the folder with the homes of the trials called `name`."""
        return self.folder / f"homes-{name}"

    def run(self, homes: str, what: str, plan: dict[str, object], *, is_killed: bool = False) -> Trace:
        """Run one trial to its end, and return its trace.

        An earlier trial may have used its homes. The plan has the fields of `holdfast.watch.trial.TrialPlan`,
        without the folder.
        """
        self.num_trials += 1
        own = self.folder / f"trial-{self.num_trials}"
        own.mkdir()
        plan_file, log = own / "plan.json", own / "log.txt"
        plan_file.write_text(json.dumps({"folder": str(own), **plan}))
        trial = {WATCH: "holdfast.watch.trial:Trial", TRIAL: str(plan_file)}
        env = sandbox_environment(self.homes(homes)) | trial
        began_s = time.monotonic()
        with process_group(self.command, env, log) as process:
            try:
                status = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                status = None
        trace = Trace(own)
        print_note(f"trial {self.num_trials}: {what}: {time.monotonic() - began_s:.1f} s")
        if status is None:
            problem = f"ran for more than {self.timeout_s:.0f} s"
        elif not trace.has_files:
            problem = f"ended with status {status} and created no Checkpointer"
        elif status and not is_killed:
            problem = f"failed with status {status}"
        elif is_killed and not trace.was_killed:
            problem = f"ended with status {status} before it could be killed"
        else:
            return trace
        raise InvalidInput(f"{what}: the script {problem}. The end of its output:\n{end_of(log)}")


def script_words(script: str, args: Sequence[str]) -> list[str]:
    """Return the command that starts a training script, as the user starts it."""
    if script.endswith(".py"):
        if not Path(script).is_file():
            raise InvalidInput(f"The script {script!r} does not exist. {nearest_hint(script)}")
        return [sys.executable, script, *args]
    if shutil.which(script) is None:
        raise InvalidInput(
            f"The command {script!r} does not exist. Give a Python file, or a command after --."
        )
    return [script, *args]


@contextlib.contextmanager
def trials(command: str, args: argparse.Namespace) -> Iterator[Trials]:
    """Yield trials of a script in a temporary folder, which is copied to `--keep` at the end."""
    words, timeout_s = script_words(args.script, args.args), parse_duration(args.timeout, "--timeout")
    with temporary_folder(command) as folder:
        try:
            yield Trials(words, folder, timeout_s)
        finally:
            if args.keep:
                shutil.copytree(folder, args.keep, dirs_exist_ok=True)


def newest_steps(homes: Path) -> dict[str, int]:
    """Return the newest step with a manifest in each home, by name."""
    found: dict[str, int] = {}
    for manifest in sorted(homes.glob(f"*/{names.step_dir(0)[:5]}*/manifest-*.json")):
        home = manifest.parent.parent.name
        found[home] = max(found.get(home, 0), int(manifest.parent.name[5:]))
    return found
