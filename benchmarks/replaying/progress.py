"""Steps and starts of a job's attempts, and the sums over them; pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

PARTS = (
    "until the command",
    "import of torch",
    "joining of ranks",
    "first optimizer",
    "resume and first step",
)
"""Parts of the pause between the last step of an attempt and the first one of the next."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps that one attempt has completed."""

    attempt: int
    steps: tuple[tuple[int, float], ...]  # with their times
    start: tuple[float, ...]  # times: command, torch imported, ranks joined, optimizer made


def sum_up(attempts: list[Progress], end_unix_s: float) -> dict[str, Any]:
    """Return useful and lost steps from the first completed step on, and the pauses between attempts."""
    first, last = attempts[0], attempts[-1]
    done = [step for step, at_s in last.steps if at_s <= end_unix_s]
    useful = done[-1] if done else last.steps[0][0] - 1  # those that it resumed with
    pairs = list(itertools.pairwise(attempts))
    return {
        "useful_steps": useful - first.steps[0][0],
        "lost_steps": sum(one.steps[-1][0] - (after.steps[0][0] - 1) for one, after in pairs),
        "restarts": last.attempt - first.attempt,
        "pauses": [_pause(one, after) for one, after in pairs],
    }


def _pause(one: Progress, after: Progress) -> dict[str, float]:
    """Return the seconds of each part of a pause."""
    moments = (one.steps[-1][1], *after.start, after.steps[0][1])
    return {part: end - begin for part, (begin, end) in zip(PARTS, itertools.pairwise(moments), strict=True)}
