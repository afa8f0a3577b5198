"""Tail of growing files, woken by inotify."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Iterator
from pathlib import Path

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


class LineReader:
    """Reader of a growing file. Returns complete lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._rest = b""

    def lines(self, *, is_end: bool = False) -> Iterator[str]:
        """Yield the new complete lines.

        Args:
            is_end: no more output follows, so yield an incomplete last line too.
        """
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
        while data := os.read(self._fd, _CHUNK_BYTES):
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if is_end and self._rest:
            yield self._rest.decode("utf-8", "replace")
            self._rest = b""

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, with long lines shortened to their end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (64 << 10)))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line[-500:] for line in lines[-num_lines:]]
