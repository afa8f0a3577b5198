"""Time and memory of a step: CPU time on a CPU, wall time until the queue is empty on a GPU."""

from __future__ import annotations

import contextlib
import re
import resource
import time
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class DeviceClock:
    """Clock and memory meter for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._can_reset = True

    def synchronize(self) -> None:
        """Wait until the device has finished its queue."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def now_s(self) -> float:
        """Return seconds of work: CPU time of this process on a CPU, otherwise wall time."""
        return time.perf_counter() if self.is_cuda else time.process_time()

    def total_spent_s(self) -> float:
        """Return the same, including the CPU time of child processes such as compilers."""
        if self.is_cuda:
            return time.perf_counter()
        both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(one.ru_utime + one.ru_stime for one in both)

    def reset_peak(self) -> None:
        """Reset the peak of memory."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._can_reset:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._can_reset = False  # then peaks of single steps cannot be measured

    def peak_bytes(self) -> int | None:
        """Return the peak of memory since `reset_peak`, or None if it cannot be measured."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return _status_bytes("VmHWM") if self._can_reset else None

    def used_bytes(self) -> int | None:
        """Return the memory in use now."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{key}:\s*(\d+) kB", _STATUS.read_text(), re.M):
            return int(found[1]) * 1024
    return None
