"""Settings from `init()` and the environment: places, interval, and this process's share of memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.store.factory import absolute_place
from holdfast.errors import InvalidInput, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.units import format_bytes, parse_bytes, parse_duration

PATH = "NEBULA_PERSISTENT_STORAGE_PATH"
INTERVAL = "NEBULA_PERSISTENT_TIME_INTERVAL"
LOCAL = "HOLDFAST_LOCAL"


@dataclass(frozen=True, slots=True)
class Settings:
    """Home, nearer tier and interval of a session."""

    home: str
    interval_s: float | None  # between two checkpoints that are copied to home; None: every one is
    keep_local: int
    local: str | None  # folder for this run only
    local_root: str | None  # folder of the host with one folder per run


def make_settings(
    path: Any, interval: Any, retention: Any, local: Any, environ: Mapping[str, str]
) -> Settings:
    """Return the settings from arguments and the environment."""
    home = parse_location(environ.get(PATH) if path is None else path)
    seconds = _interval(environ.get(INTERVAL) if interval is None else interval)
    if isinstance(retention, bool) or not isinstance(retention, int) or retention < 1:
        raise InvalidInput(f"num_of_version_in_retention must be 1 or more, not {retention!r}.")
    root = environ.get(LOCAL)
    if root is None and seconds is not None:
        root = str(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}")
    return Settings(home, seconds, retention, None if local is None else parse_location(local), root)


def parse_location(path: Any) -> str:
    """Return the absolute path or URL of a location. A tuple of one path is accepted with a warning."""
    if isinstance(path, tuple) and len(path) == 1:
        message = (
            f"The path is a tuple, {path!r}, because a comma follows it. Its only element is used. Remove "
            "the comma."
        )
        warn(message, SaveWarning)
        path = path[0]
    if path is None or path == "":
        raise InvalidInput(
            "The location of checkpoints is missing, so nothing can be saved. Call init(path), or "
            f"set {PATH} to a folder or to a URL such as s3://BUCKET/RUN."
        )
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInput(f"persistent_storage_path must be a path or URL, not {path!r}.")
    return absolute_place(path)


def _interval(value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return parse_duration(value, "persistent_time_interval")
    return None if seconds == 0 else parse_duration(seconds, "persistent_time_interval")


VARIABLE = "NEBULA_MEMORY_BUFFER_SIZE"
_MIN_BYTES = 64 << 20
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory limit of one process, and its origin.

    If a limit is set, several processes on the node share one half of it, and a single one has all of it.
    Without a limit, they share half of the free memory.
    """

    cap_bytes: int
    num_processes: int
    is_set: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], available_bytes: int) -> MemoryBudget:
        """Return the budget from the environment."""
        processes = environ.get("LOCAL_WORLD_SIZE", "1")
        if not processes.isdecimal() or int(processes) < 1:
            raise InvalidInput(f"LOCAL_WORLD_SIZE must be a number of processes, not {processes!r}.")
        count, limit = int(processes), environ.get(VARIABLE)
        if not limit:
            return cls(max(available_bytes // 2 // count, _MIN_BYTES), count, is_set=False)
        num_bytes = parse_bytes(int(limit) if limit.isdecimal() else limit, VARIABLE)
        return cls(num_bytes if count == 1 else num_bytes // 2 // count, count, is_set=True)

    def check(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        """Check that the budget is large enough for some tensors."""
        needed = image_bytes(tensors)
        if needed <= self.cap_bytes:
            return
        share = 1 if self.num_processes == 1 else 2 * self.num_processes
        split = "" if share == 1 else f" (half of {VARIABLE}, divided by {self.num_processes} processes)"
        found = (
            f"{VARIABLE} leaves"
            if self.is_set
            else f"half of the free memory, as {VARIABLE} is not set, leaves"
        )
        raise InvalidInput(
            f"The checkpoint {tag!r} needs {needed} bytes of memory in this process, but {found} "
            f"{self.cap_bytes} ({format_bytes(self.cap_bytes)}){split}. Nothing was saved. Set {VARIABLE} to "
            f"at least {needed * share}; with twice that, a save can begin while the previous one is "
            "being written."
        )


def image_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of a file image with these tensors, rounded up: header, data and padding."""
    sizes = [tensor.nbytes + 512 for tensor in tensors]
    return -(-(sum(sizes) + 4 * _BLOCK_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
