"""Mounted file systems, from the kernel's list. Reading it does not wait for dead servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


class MountPoint(Struct, frozen=True):
    """Mounted file system."""

    device: str  # identity of the file system
    root: Path  # directory of it that is mounted
    path: Path  # directory where it is mounted


def mount_points() -> Iterator[MountPoint]:
    """Yield all mounts of this process's namespace in the order of mounting, see proc_pid_mountinfo(5)."""
    for line in _MOUNTS.read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        root, path = (Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)) for field in fields[3:5])
        yield MountPoint(fields[2], root, path)
