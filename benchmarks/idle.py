"""Wait until a disk has done what was asked of it, discards of deleted files included."""

from __future__ import annotations

import os
import time
from pathlib import Path

PERIOD_S, QUIET_PERIODS = 0.01, 10
LIMIT_S = 4.0
"""Longest wait: others may use the disk too."""


def wait_idle(directory: Path) -> bool:
    """Wait until nothing is in flight on the disk of a directory for a tenth of a second.

    Returns: False if it was not idle within `LIMIT_S`, or if the disk has no counters.

    Blocks: at most `LIMIT_S`.
    """
    os.sync()  # a file system discards what was deleted when it commits the deletion
    counters = _counters_of(directory)
    if counters is None:
        return False
    quiet, until = 0, time.monotonic() + LIMIT_S
    before = counters.read_text().split()
    while quiet < QUIET_PERIODS and time.monotonic() < until:
        time.sleep(PERIOD_S)
        now = counters.read_text().split()
        # the ninth number is what is in flight; the others change when something was between two looks
        quiet = quiet + 1 if now[8] == "0" and now == before else 0
        before = now
    return quiet >= QUIET_PERIODS


def _counters_of(directory: Path) -> Path | None:
    device = directory.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return counters if counters.exists() else None
