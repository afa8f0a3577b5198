"""Available memory of this host, or of the control group that this process runs in."""

from __future__ import annotations

from pathlib import Path

_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage and reclaimable cache of a control group, by cgroup version 2 and 1."""


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may still take.

    The tightest of the machine and the control groups around this process counts.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return min([int(available.split()[1]) * 1024, *_available_in_groups(root)])


def _available_in_groups(root: Path) -> list[int]:
    """Return what the limits of this process's control group and of its parents leave."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if (available := _available_in_group(folder)) is not None:
                found.append(available)
            if folder == top:
                break
    return found


def _available_in_group(folder: Path) -> int | None:
    """Return what one group's limit leaves, counting reclaimable cache, or None without a limit."""
    for limit_name, usage_name, cache_key in _GROUP_FILES:
        if not (folder / limit_name).exists():
            continue
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        lines = (folder / "memory.stat").read_text().splitlines()
        cached = next((int(line.split()[1]) for line in lines if line.split()[0] == cache_key), 0)
        return max(0, int(limit) - int((folder / usage_name).read_text()) + cached)
    return None
