"""Watch of growing files, by inotify, and the last lines of one."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

from holdfast.jobs.output.block import last_texts

_IN_MODIFY, _IN_ATTRIB, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x4, 0x100, 0x80
_IN_CLOEXEC, _IN_NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_CHUNK_BYTES = 1 << 16
_POLL_S = 5.0
"""Interval of polling where inotify is unavailable or misses changes."""


class FolderWatch:
    """Watch of folders, readable when a file in them changes.

    Args:
        folders: folders to watch, without their subfolders.
    """

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        mask = _IN_MODIFY | _IN_ATTRIB | _IN_CREATE | _IN_MOVED_TO
        for folder in folders if self._fd >= 0 else ():
            libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)

    def wait(self, timeout_s: float = _POLL_S) -> None:
        """Wait for a change since the last call.

        Blocks: at most `timeout_s`.
        """
        if self._fd < 0:
            select.select([], [], [], min(timeout_s, 0.2))
            return
        if select.select([self._fd], [], [], timeout_s)[0]:
            os.read(self._fd, _CHUNK_BYTES)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            os.close(self._fd)


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, with long lines shortened to their end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (64 << 10)))
            lines = last_texts(file.read()).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line[-500:] for line in lines[-num_lines:]]
