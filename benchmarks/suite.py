"""All benchmarks behind the goals, one after the other, and the tables of the documents afterwards."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCUMENTS = ("README.md", "benchmarks/RESULTS.md", "docs/limits.md")


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark, with its options in the short form and in the long one; None: only in the other form."""

    name: str
    short: tuple[str, ...] | None
    long: tuple[str, ...]
    limit_s: float


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


PARTS = (
    Part("run", (), ("--long",), 6 * 3600),
    Part("firstbyte", ("--rounds", "10"), ("--rounds", "30"), 900),
    Part("startup", ("--rounds", "10"), (), 900),
    Part("tiers", ("--rounds", "3"), (), 1800),
    Part("remote", ("--rounds", "3"), (), 1800),
    Part("scale", ("--worlds", "1024", "--rounds", "1"), (), 3600),
    Part("writeback", None, (), 3600),
    Part("recovering", None, (), 3600),
    Part("sharding", None, (), 3600),
    Part("compiled", None, (), 3600),
    Part("resharding", None, (), 3600),
    Part("draining", None, (), 3600),
)


def main() -> int:
    """Run all parts; the exit status is 1 if one has failed or missed a goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="every part in full, which takes several hours")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="some parts")
    options = parser.parse_args()
    outcomes = {}
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        is_long = options.long or (options.only and part.short is None)
        words = part.long if is_long else part.short
        if words is not None:
            outcomes[part.name] = _run(part, words)
    for document in DOCUMENTS:
        words = (str(HERE.parent / document),)
        outcomes[f"tables of {document}"] = _run(Part("table", words, words, 60), words)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome.text}")
    return int(any(outcome.status != 0 for outcome in outcomes.values()))


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
