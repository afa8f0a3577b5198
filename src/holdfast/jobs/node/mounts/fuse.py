"""File systems mounted below a folder: found in the kernel's own list, and taken away, stale ones too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from holdfast.errors import Conflict

_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_LIMIT_S = 30.0


def mounted_below(folder: Path) -> list[Path]:
    """Where something is mounted at a folder or below it, the deepest first.

    The kernel is asked, not the file system: a mount whose server is dead answers nothing.
    """
    root = os.fsencode(folder)
    found = []
    for line in _MOUNTS.read_bytes().splitlines():
        path = _ESCAPE.sub(lambda code: bytes([int(code[1], 8)]), line.split(b" ")[4])
        if path == root or path.startswith(root + b"/"):
            found.append(Path(os.fsdecode(path)))
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted just there."""
    return path in mounted_below(path)


def unmount_below(folder: Path) -> None:
    """Take away all that is mounted at a folder or below it.

    Files that somebody still has open keep working for them until they are closed.

    Raises:
        Conflict: something could not be taken away.
    """
    for path in mounted_below(folder):
        _unmount(path)


def _unmount(path: Path) -> None:
    said = []
    for words in (["fusermount3", "-uz"], ["fusermount", "-uz"], ["umount", "-l"]):
        if shutil.which(words[0]) is None:
            continue
        done = subprocess.run(
            [*words, str(path)], capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
        if path not in mounted_below(path):
            return
        said.append(done.stderr.strip())
    raise Conflict(f"{path} is mounted, and could not be unmounted: {'; '.join(said)}.")
