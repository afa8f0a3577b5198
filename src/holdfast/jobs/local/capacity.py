"""Capacity of this machine, or of the part of it that its processes may use."""

from __future__ import annotations

import os

from holdfast.jobs.local.allocation import Capacity
from holdfast.system.host_memory import total_bytes

_MIB = 1 << 20


def read_capacity() -> Capacity:
    """Return the CPUs of this process, and the memory of its control groups."""
    return Capacity(float(len(os.sched_getaffinity(0))), total_bytes() // _MIB)
