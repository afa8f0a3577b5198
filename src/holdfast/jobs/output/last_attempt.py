"""End of the output of a node's newest attempt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.jobs.output.tail import last_lines

HEADLINE = "holdfast: "
"""Beginning of the first line of an attempt, which names its number."""
_NUM_LINES = 200


def attempt_lines(log: Path) -> list[str]:
    """Return the last lines of the newest attempt in a log, without its first one."""
    lines = last_lines(log, _NUM_LINES)
    return lines[_last_headline(lines) + 1 :]


def _last_headline(lines: Sequence[str]) -> int:
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        if line.startswith(HEADLINE) and " attempt " in line and " starts" in line:
            return number
    return -1
