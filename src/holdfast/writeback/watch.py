"""What happens in a directory tree, in order, as the kernel's inotify tells it.

Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import RetryLater, Unsupported

CLOSED, CREATED, DELETED, MOVED_FROM, MOVED_TO, LOST = 0x8, 0x100, 0x200, 0x40, 0x80, 0x4000
"""Kinds: a writer closed it, its name is new, gone, left for another, taken over; events were lost."""
_IGNORED, _IS_DIRECTORY = 0x8000, 0x40000000
_ONLY_DIRECTORIES, _NO_LINKS, _NOT_AFTER_UNLINK = 0x01000000, 0x02000000, 0x04000000
_WATCHED = (
    CLOSED | CREATED | DELETED | MOVED_FROM | MOVED_TO | _ONLY_DIRECTORIES | _NO_LINKS | _NOT_AFTER_UNLINK
)
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to a name. `pair` - the same number in both events of one rename."""

    kind: int
    name: str
    is_directory: bool = False
    pair: int = 0


class Watch:
    """Watches a directory and everything below it.

    Args:
        root: the directory.
        skips: names that are not watched, and nothing below them.

    Raises:
        Unsupported: this system has no inotify, or allows no more of its instances.
    """

    def __init__(self, root: Path, skips: Callable[[str], bool]) -> None:
        self._root, self._skips = root, skips
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise Unsupported(
                f"{root} cannot be watched: {reason}. Raise fs.inotify.max_user_instances, if it is that."
            )
        self._names: dict[int, str] = {}

    def fileno(self) -> int:
        """For `poll`: readable when something happened."""
        return self._fd

    def close(self) -> None:
        """Watch no more."""
        os.close(self._fd)

    def add_tree(self, name: str = "") -> None:
        """Watch a directory and all below it; what is watched already stays so, under the name it has now.

        Raises:
            Unsupported: the system allows no more watches.
            RetryLater: it could not be looked at.
        """
        pending = [name]
        while pending:
            below = pending.pop()
            if not self._add(below):
                continue
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / below) as entries:
                for one in entries:
                    inner = f"{below}/{one.name}" if below else one.name
                    if one.is_dir(follow_symlinks=False) and not self._skips(inner):
                        pending.append(inner)

    def forget_tree(self, name: str) -> None:
        """Watch a directory no more that left the tree, nor what is below it."""
        for number, known in list(self._names.items()):
            if known == name or known.startswith(f"{name}/"):
                self._libc.inotify_rm_watch(self._fd, number)
                del self._names[number]

    def read(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events: list[Event] = []
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _READ_BYTES):
                events += self._parse(data)
        return events

    def _add(self, name: str) -> bool:
        """Watch one directory; False if it is gone meanwhile."""
        path = os.fsencode(self._root / name)
        number = self._libc.inotify_add_watch(self._fd, path, _WATCHED)
        if number >= 0:
            self._names[number] = name
            return True
        reason = ctypes.get_errno()
        if reason in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return False
        if reason == errno.ENOSPC:
            raise Unsupported(
                f"{self._root} has more directories than this system lets one user watch; raise "
                "fs.inotify.max_user_watches."
            )
        raise RetryLater(f"{self._root / name} cannot be watched: {os.strerror(reason)}.")

    def _parse(self, data: bytes) -> list[Event]:
        events, at = [], 0
        while at < len(data):
            number, mask, pair, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size + length
            if mask & LOST:
                events.append(Event(LOST, ""))
            elif mask & _IGNORED:
                self._names.pop(number, None)
            elif number in self._names:
                own = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                folder = self._names[number]
                name = f"{folder}/{own}" if folder else own
                if own and not self._skips(name):
                    kind = mask & (CLOSED | CREATED | DELETED | MOVED_FROM | MOVED_TO)
                    events.append(Event(kind, name, bool(mask & _IS_DIRECTORY), pair))
        return events
