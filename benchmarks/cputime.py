"""Processor time that this process and its children have used, and that others have used meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Seconds of processor time of this process, its living children, and those that it has waited for.

    Keepers are children too. The time of living processes is exact; that of ended ones has steps of 10 ms.
    """
    own = os.times()
    total = time.process_time() + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        # a child may end while it is being looked at
        with contextlib.suppress(psutil.Error, OSError):
            times = child.cpu_times()
            total += time.clock_gettime(_clock_of(child.pid)) + times.children_user + times.children_system
    return total


def others_s() -> float:
    """Seconds of processor time of all other programs, and that the host gave to other virtual machines.

    Time within the kernel is left out: its threads may be writing what this process has written.
    """
    user, nice, *_, steal = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    own = os.times()
    own_s = own.user + own.children_user
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            own_s += times.user + times.children_user
    return (user + nice + steal) / TICKS_PER_S - own_s


def _clock_of(pid: int) -> int:
    """Return the id of the clock of another process's processor time, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2
