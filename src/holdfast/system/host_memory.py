"""Memory of this host, or of the control group that this process runs in: available and in total."""

from __future__ import annotations

from collections.abc import Iterator
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
    found = (_available_in_group(folder) for folder in _groups(root))
    return min([_of_machine(root, "MemAvailable"), *(one for one in found if one is not None)])


def total_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that all processes here may take together.

    The tightest of the machine and the control groups around this process counts.
    """
    found = (_limit_of_group(folder) for folder in _groups(root))
    return min([_of_machine(root, "MemTotal"), *(one for one in found if one is not None)])


def _of_machine(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of its parents."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder
            if folder == top:
                break


def _limit_of_group(folder: Path) -> int | None:
    """Return one group's limit, or None without one."""
    for limit_name, _, _ in _GROUP_FILES:
        if (folder / limit_name).exists():
            limit = (folder / limit_name).read_text().strip()
            return None if limit == "max" else int(limit)
    return None


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
