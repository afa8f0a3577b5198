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

    The tightest of the machine and the control groups around this process counts, with their reclaimable
    cache.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    found = [_of_machine(root, "MemAvailable")]
    for limit, usage, cached in _groups(root):
        stat = (line.partition(" ") for line in usage.with_name("memory.stat").read_text().splitlines())
        cache_bytes = next((int(value) for name, _, value in stat if name == cached), 0)
        found.append(max(0, limit - int(usage.read_text()) + cache_bytes))
    return min(found)


def total_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that all processes here may take together.

    The tightest of the machine and the control groups around this process counts.
    """
    return min([_of_machine(root, "MemTotal"), *(limit for limit, _, _ in _groups(root))])


def _of_machine(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def _groups(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield the limit, the file with the usage and the name of the cache of each limiting control group."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inner = top / path.lstrip("/")
        for folder in (one for one in (inner, *inner.parents) if one.is_relative_to(top)):
            files = next((names for names in _GROUP_FILES if (folder / names[0]).exists()), None)
            limit = "max" if files is None else (folder / files[0]).read_text().strip()
            if files is not None and limit != "max":
                yield int(limit), folder / files[1], files[2]
