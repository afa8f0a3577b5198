"""Memory of this process and its children: now, and its peak while something runs."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

PERIOD_S = 0.02
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ (\S+) (\d+)\s*(.*)$")
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory that cannot be dropped: private memory, and shared memory once for the whole tree.

    File pages that the kernel could drop (libraries, the page cache) are left out; `helpers` is the
    private part of the children alone.
    """

    own: int
    helpers: int
    shared: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.own + self.helpers + self.shared


def footprint() -> Footprint:
    """Return the memory of this process and its children now.

    Blocks: for about 20 ms per GB, to walk the page tables.
    """
    own_private, segments = _process(os.getpid())
    helpers = 0
    for child in psutil.Process().children(recursive=True):
        # a child may end while it is being looked at
        with contextlib.suppress(OSError, psutil.Error):
            private, mapped = _process(child.pid)
            helpers += private
            for inode, num_bytes in mapped.items():
                segments[inode] = max(segments.get(inode, 0), num_bytes)
    return Footprint(own_private, helpers, sum(segments.values()))


def _process(pid: int) -> tuple[int, dict[str, int]]:
    """Private bytes of a process, and bytes of each shared memory object it maps or has open."""
    private = 0
    resident: dict[str, int] = {}
    inode: str | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _MAPPING.match(line):
            shared = match[1][3] == "s" and match[4].startswith(_SHARED)
            inode = f"{match[2]}:{match[3]}" if shared else None
        elif inode is not None and line.startswith("Rss:"):
            resident[inode] = resident.get(inode, 0) + _kib(line)
        elif inode is None and line.startswith("Anonymous:"):
            private += _kib(line)
    # an object that nobody maps still fills memory; one mapped twice fills it once
    return private, resident | dict(_open_segments(pid))


def _open_segments(pid: int) -> list[tuple[str, int]]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(_SHARED):
                facts = link.stat()
                device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
                found.append((f"{device}:{facts.st_ino}", facts.st_blocks * 512))
    return found


def _kib(line: str) -> int:
    return int(line.split()[1]) << 10


class Watch:
    """Samples the footprint in a thread while its `with` block runs; `peak` is the highest seen."""

    def __init__(self) -> None:
        self.peak = footprint()
        self.helpers_peak = self.peak.helpers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._take()

    def _take(self) -> None:
        now = footprint()
        self.helpers_peak = max(self.helpers_peak, now.helpers)
        if now.total > self.peak.total:
            self.peak = now


def peak_tensor_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Bytes that tensors held at the worst moment of a function, beyond what was held before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
        gc.collect()
    found: Any = profile.profiler
    changes = [one for one in found.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda one: one.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most
