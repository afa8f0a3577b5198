"""Processor time that this process and its children have used."""

from __future__ import annotations

import contextlib
import os

import psutil


def cpu_s() -> float:
    """Seconds of processor time of this process, its living children, and those that it has waited for."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        # a child may end while it is being looked at
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total
