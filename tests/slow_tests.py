"""List of the tests that take long, which `make test` leaves out: `python tests/slow_tests.py REPORT`.

The list, `slow_tests.txt`, is made from the durations in the report of a run of all tests with `--junitxml`.
A test that is marked `essential` runs nevertheless. The idea is that of github.com/pytorch/test-infra.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
ROOT = LIST.parents[1]
LIMIT_S = 2.0
"""Seconds from which a test is in the list, measured with three workers on two busy cores."""


def read() -> frozenset[str]:
    """Return the tests of the list, by their ids."""
    return frozenset(LIST.read_text().splitlines())


def main() -> None:
    """Write the list anew; tests that the report does not have keep their place in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="that of a run with the tests of the list")
    durations = _durations(parser.parse_args().report)
    slow = {name for name, seconds in durations.items() if seconds >= LIMIT_S}
    LIST.write_text("".join(f"{name}\n" for name in sorted(slow | (read() - durations.keys()))))


def _durations(report: Path) -> dict[str, float]:
    """Return the seconds of each test with its fixtures, by its id."""
    return {
        _id(where, case.get("name", "")): float(case.get("time", 0))
        for case in ElementTree.parse(report).iter("testcase")
        if (where := case.get("classname"))  # a module that was skipped as a whole has none
    }


def _id(where: str, name: str) -> str:
    """Return the id of a test, of which a report has the file and the class as one dotted name."""
    parts = where.split(".")
    for end in range(len(parts), 0, -1):
        file = "/".join(parts[:end]) + ".py"
        if (ROOT / file).exists():
            return "::".join([file, *parts[end:], name])
    raise ValueError(f"{where} is not a file of tests")


if __name__ == "__main__":
    main()
