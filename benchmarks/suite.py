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
        words = part.long if options.long else part.short
        if words is None or (options.only and part.name not in options.only):
            continue
        outcomes[part.name] = _run(part, words)
    for document in DOCUMENTS:
        subprocess.run([sys.executable, str(HERE / "table.py"), str(HERE.parent / document)], check=False)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return int(any(not outcome.startswith("0 ") for outcome in outcomes.values()))


def _run(part: Part, words: tuple[str, ...]) -> str:
    """Run one part, and return its exit status and duration."""
    print(f"== {part.name} {' '.join(words)}", flush=True)
    began = time.monotonic()
    command = [sys.executable, str(HERE / f"{part.name}.py"), *words]
    try:
        status = str(subprocess.run(command, check=False, timeout=part.limit_s).returncode)
    except subprocess.TimeoutExpired:
        status = f"stopped after {part.limit_s:.0f} s;"
    return f"{status} after {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
