"""Seconds and bytes of a step: on a CPU the processor's, on a device those until its queue is empty."""

from __future__ import annotations

import contextlib
import re
import resource
import time
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class Clock:
    """Measures what runs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._can_reset = True

    def settle(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def now_s(self) -> float:
        """Seconds for work: CPU time of this process's threads on a CPU, else the time on the wall."""
        return time.perf_counter() if self.is_cuda else time.process_time()

    def spent_s(self) -> float:
        """The same with the CPU time of children that have ended: compilers are such."""
        if self.is_cuda:
            return time.perf_counter()
        both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(one.ru_utime + one.ru_stime for one in both)

    def reset_peak(self) -> None:
        """Begin to look for the peak of memory anew."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._can_reset:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._can_reset = False  # then peaks cannot be told apart, and none are

    def peak_bytes(self) -> int | None:
        """Greatest memory in use since `reset_peak`; None where that cannot be told."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return _status_bytes("VmHWM") if self._can_reset else None

    def used_bytes(self) -> int | None:
        """Memory in use now."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{key}:\s*(\d+) kB", _STATUS.read_text(), re.M):
            return int(found[1]) * 1024
    return None
