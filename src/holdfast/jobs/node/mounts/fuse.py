"""FUSE file systems below a folder: found in the kernel's list, and unmounted even if stale."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from holdfast.errors import Conflict
from holdfast.linux.mounts import mount_points

_LIMIT_S = 30.0


def mounted_below(folder: Path) -> list[Path]:
    """Return the mount points at or below a folder, deepest first.

    Reads the kernel's list, as a file system whose server is dead does not respond.
    """
    found = [mount.path for mount in mount_points() if mount.path.is_relative_to(folder)]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def is_mounted(path: Path) -> bool:
    """Return True if a file system is mounted at a path."""
    return path in mounted_below(path)


def unmount_below(folder: Path) -> None:
    """Unmount all file systems at or below a folder.

    Open files keep working until they are closed.

    Raises:
        Conflict: a file system cannot be unmounted.
    """
    for path in mounted_below(folder):
        _unmount(path)


def _unmount(path: Path) -> None:
    errors = []
    for words in (["fusermount3", "-uz"], ["fusermount", "-uz"], ["umount", "-l"]):
        if shutil.which(words[0]) is None:
            continue
        done = subprocess.run(
            [*words, str(path)], capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
        if path not in mounted_below(path):
            return
        errors.append(done.stderr.strip())
    raise Conflict(f"Cannot unmount {path}: {'; '.join(errors)}.")
