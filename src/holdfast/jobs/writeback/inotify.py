"""File events of a directory tree, from the kernel's inotify.

Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from holdfast.errors import RetryLater, Unsupported

CLOSED, CREATED, DELETED, MOVED_FROM, MOVED_TO, LOST = 0x8, 0x100, 0x200, 0x40, 0x80, 0x4000
"""Kinds of events: closed after writing, created, deleted, moved away, moved here, events lost."""
_IGNORED, _IS_DIRECTORY = 0x8000, 0x40000000
_ONLY_DIRECTORIES, _NO_LINKS, _NOT_AFTER_UNLINK = 0x01000000, 0x02000000, 0x04000000
_KINDS = CLOSED | CREATED | DELETED | MOVED_FROM | MOVED_TO
_WATCHED = _KINDS | _ONLY_DIRECTORIES | _NO_LINKS | _NOT_AFTER_UNLINK
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 20


class FileEvent(Struct, frozen=True):
    """Event of one name. Both events of a rename have the same `pair`."""

    kind: int
    name: str
    is_directory: bool = False
    pair: int = 0


class TreeWatch:
    """Watch of a directory and everything below it."""

    def __init__(self, root: Path, is_excluded: Callable[[str], bool]) -> None:
        self._root, self._is_excluded = root, is_excluded
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            reason = f"{os.strerror(ctypes.get_errno())}. You may have to raise fs.inotify.max_user_instances"
            raise Unsupported(f"Cannot watch {root}: {reason}.")
        self._names: dict[int, str] = {}

    def fileno(self) -> int:
        """Return the descriptor, which is readable when events are pending."""
        return self._fd

    def add_tree(self, name: str = "") -> None:
        """Watch a directory and everything below it. Renews the names of directories already watched."""
        pending = [name]
        while pending:
            below = pending.pop()
            if not self._add(below):
                continue
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / below) as entries:
                for entry in entries:
                    inner = f"{below}/{entry.name}" if below else entry.name
                    if entry.is_dir(follow_symlinks=False) and not self._is_excluded(inner):
                        pending.append(inner)

    def forget_tree(self, name: str) -> None:
        """Stop watching a directory that left the tree, and everything below it."""
        for number, known in list(self._names.items()):
            if known == name or known.startswith(f"{name}/"):
                self._libc.inotify_rm_watch(self._fd, number)
                del self._names[number]

    def read(self) -> list[FileEvent]:
        """Return the events since the last call, in order."""
        events: list[FileEvent] = []
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _READ_BYTES):
                events += self._parse(data)
        return events

    def _add(self, name: str) -> bool:
        """Watch one directory. Return False if it no longer exists."""
        path = os.fsencode(self._root / name)
        number = self._libc.inotify_add_watch(self._fd, path, _WATCHED)
        if number >= 0:
            self._names[number] = name
            return True
        reason = ctypes.get_errno()
        if reason in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return False
        if reason == errno.ENOSPC:
            what = f"{self._root} has more directories than one user may watch"
            raise Unsupported(f"{what}. Raise fs.inotify.max_user_watches.")
        raise RetryLater(f"Cannot watch {self._root / name}: {os.strerror(reason)}.")

    def _parse(self, data: bytes) -> list[FileEvent]:
        events, at = [], 0
        while at < len(data):
            number, mask, pair, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size + length
            if mask & LOST:
                events.append(FileEvent(LOST, ""))
            elif mask & _IGNORED:
                self._names.pop(number, None)
            elif number in self._names:
                own = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                folder = self._names[number]
                name = f"{folder}/{own}" if folder else own
                if own and not self._is_excluded(name):
                    kind = mask & _KINDS
                    events.append(FileEvent(kind, name, bool(mask & _IS_DIRECTORY), pair))
        return events
