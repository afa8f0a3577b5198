"""FUSE file systems below a folder: found in the kernel's list, and unmounted even if stale."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from holdfast.errors import Conflict, TimedOut
from holdfast.system.linux.mounts import mount_points
from holdfast.system.linux.program_runs import run_program

_LIMIT_S = 30.0
_DEVICE = Path("/dev/fuse")


def why_not_mountable(source: str) -> str:
    """Return why this machine cannot mount a bucket, and what to use instead. Empty if it can."""
    lacking = []
    if shutil.which("rclone") is None:
        lacking.append("the program rclone (`apt-get install rclone`, or from rclone.org)")
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        lacking.append("the program fusermount3 (`apt-get install fuse3`)")
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        lacking.append(f"{_DEVICE} (in a container: `--device /dev/fuse --cap-add SYS_ADMIN`)")
    if not lacking:
        return ""
    return (
        f"mounting {source} as a file system requires {' and '.join(lacking)}. Alternatively, "
        "`mode: MOUNT_CACHED` writes to the bucket through a local directory, and `mode: COPY` copies it to "
        "this machine."
    )


def mounted_below(folder: Path) -> list[Path]:
    """Return the mount points at or below a folder, deepest first, from the kernel's list."""
    # A file system whose server is dead does not respond.
    found = [mount.path for mount in mount_points() if mount.path.is_relative_to(folder)]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def is_mounted(path: Path) -> bool:
    """Return True if a file system is mounted at a path."""
    return path in mounted_below(path)


def unmount_below(folder: Path) -> None:
    """Unmount all file systems at or below a folder. Open files keep working until they are closed."""
    for path in mounted_below(folder):
        _unmount(path)


def _unmount(path: Path) -> None:
    errors = []
    for words in (["fusermount3", "-uz"], ["fusermount", "-uz"], ["umount", "-l"]):
        if shutil.which(words[0]) is None:
            continue
        try:
            error = run_program([*words, str(path)], timeout_s=_LIMIT_S).error
        except TimedOut as late:
            error = str(late)
        if path not in mounted_below(path):
            return
        errors.append(error)
    raise Conflict(f"Cannot unmount {path}: {'; '.join(errors)}.")
