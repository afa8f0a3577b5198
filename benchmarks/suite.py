"""All benchmarks behind the goals, one after the other, and the tables of the documents afterwards.

With --check it writes no results and no table. It measures what the committed results of this hardware have,
and fails if a ratio is more than 15 % worse.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import machine
from goals import Goal, Measurements, judge
from rich.console import Console
from rich.table import Table
from table import RESULTS, by_kind, hardware_of, read_results

HERE = Path(__file__).resolve().parent
DOCUMENTS = ("README.md", "benchmarks/RESULTS.md", "docs/limits.md", "docs/why.md")


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark, with its options in the short form and in the long one; None: only in the other form.

    `check` are its options of a check, None: it has no part in it.
    """

    name: str
    short: tuple[str, ...] | None
    long: tuple[str, ...]
    limit_s: float
    check: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit status of a benchmark, or None if it was stopped at its limit, and its duration."""

    status: int | None
    took_s: float

    @property
    def text(self) -> str:
        """The outcome as text."""
        how = "stopped" if self.status is None else f"status {self.status}"
        return f"{how} after {self.took_s:.0f} s"


OURS = ("--contestants", "holdfast", "--states", "gpt2-124m", "small-8000", "--rounds", "2")
ONE_WORLD = ("--worlds", "1024", "--rounds", "1")
PARTS = (
    Part("run", (), ("--long",), 6 * 3600, check=OURS),
    Part("starts", ("--rounds", "5"), (), 1800, check=("--rounds", "3")),
    Part("firstbyte", ("--rounds", "10"), ("--rounds", "30"), 900, check=("--rounds", "5")),
    Part("startup", ("--rounds", "10"), (), 900),
    Part("tiers", ("--rounds", "3"), (), 1800, check=("--rounds", "3")),
    Part("remote", ("--rounds", "3"), (), 1800, check=("--rounds", "3")),
    Part("scale", ONE_WORLD, (), 3600, check=ONE_WORLD),
    Part("writeback", None, (), 3600),
    Part("recovering", None, (), 3600),
    Part("standby", None, (), 1800),
    Part("sharding", None, (), 3600),
    Part("compiled", None, (), 3600),
    Part("resharding", None, (), 3600),
    Part("draining", None, (), 3600),
    Part("crowded", None, (), 1800),
)
WORSE = 1.15  # a ratio to the committed value from which a check fails


def main() -> int:
    """Run all parts; the exit status is 1 if one has failed or missed a goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="every part in full, which takes several hours")
    parser.add_argument("--check", action="store_true", help="compare with the committed results")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="some parts")
    options = parser.parse_args()
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if options.check:
        return _check([part for part in parts if part.check is not None])
    outcomes = {}
    for part in parts:
        is_long = options.long or (options.only and part.short is None)
        words = part.long if is_long else part.short
        if words is not None:
            outcomes[part.name] = _run(part, words)
    for document in DOCUMENTS:
        words = (str(HERE.parent / document),)
        outcomes[f"tables of {document}"] = _run(Part("table", words, words, 60), words)
    outcomes["chart"] = _run(Part("chart", (), (), 60), ())
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.text}")
    return int(any(outcome.status != 0 for outcome in outcomes.values()))


def _check(parts: list[Part]) -> int:
    """Measure the parts, those with worse results twice, and show them beside the committed results."""
    documents = read_results(RESULTS)
    own = [one for one in documents if hardware_of(one) == hardware_of({"machine": machine.describe(HERE)})]
    if not own:
        print("No results of this hardware are committed: the ratios of the newest ones are compared.")
    committed = Measurements(by_kind(own or documents))
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        rows = _compare(committed, parts, Path(first))
        again = [
            part for part in parts if any(row.is_worse and part.name in row.goal.command for row in rows)
        ]
        if again:
            print("== again, because of worse results")
            better = {
                row.goal.what: row for row in _compare(committed, again, Path(second)) if not row.is_worse
            }
            rows = [better.get(row.goal.what, row) for row in rows]
    table = Table("goal", "committed", "now", "", title=f"at most {WORSE - 1:.0%} worse")
    for row in rows:
        table.add_row(row.goal.what, f"{row.before:.3g} {row.goal.unit}", f"{row.now:.3g}", row.verdict)
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    return int(any(row.is_worse for row in rows) or not rows)


@dataclass(frozen=True, slots=True)
class Compared:
    """A goal's committed value, and its value now."""

    goal: Goal
    before: float
    now: float

    @property
    def is_worse(self) -> bool:
        """True if the value is worse than the committed one by more than a check allows."""
        least, most = (self.before, self.now) if self.goal.at_least else (self.now, self.before)
        return least > WORSE * most

    @property
    def verdict(self) -> str:
        """The comparison as a word."""
        return "WORSE" if self.is_worse else "ok"


def _compare(committed: Measurements, parts: list[Part], folder: Path) -> list[Compared]:
    for part in parts:
        out = folder / f"{'saving' if part.name == 'run' else part.name}_check.json"
        outcome = _run(part, (*(part.check or ()), "--out", str(out)))
        print(f"{part.name}: {outcome.text}", flush=True)
        if not out.exists():
            sys.exit(f"{part.name}.py wrote no results, so nothing can be compared.")
    verdicts = zip(judge(committed), judge(Measurements(by_kind(read_results(folder)))), strict=True)
    return [
        Compared(now.goal, before.found.spread.median, now.found.spread.median)
        for before, now in verdicts
        if before.found is not None and now.found is not None
    ]


def _run(part: Part, words: tuple[str, ...]) -> Outcome:
    print(f"== {part.name} {' '.join(words)}", flush=True)
    began_s = time.monotonic()
    command = [sys.executable, str(HERE / f"{part.name}.py"), *words]
    try:
        status = subprocess.run(command, check=False, timeout=part.limit_s).returncode
    except subprocess.TimeoutExpired:
        status = None
    return Outcome(status, time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())
