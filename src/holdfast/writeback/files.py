"""What can be told of a file from outside: its fingerprint, and whether somebody has it open for writing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.store.naming import check_name

SETTLE_NS = 20_000_000
"""A file that was changed less long ago may change again without a new time, which ticks every 10 ms."""
UNSETTLED = -1
"""Time in the fingerprint of a file that was looked at too soon; no file has it, so it never matches."""
_UNTOLD_S = 2.0  # where leases are not to be had: a file that was changed less long ago counts as open


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How a file looked; see `matches`.

    `changed_ns` - time of the last write, `UNSETTLED` if another one could have the same.
    """

    num_bytes: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, info: os.stat_result, *, now_ns: int | None = None) -> Fingerprint:
        """The fingerprint that a look shows; with `now_ns`, one that matches no later look at other bytes."""
        is_fresh = now_ns is not None and not is_settled(info, now_ns)
        return cls(info.st_size, UNSETTLED if is_fresh else info.st_mtime_ns, info.st_ino)

    def matches(self, other: Fingerprint) -> bool:
        """Whether both looks were at the same bytes, for certain."""
        return self == other and self.changed_ns != UNSETTLED


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file of the directory.

    `status_changed_ns` - when bytes, name or links last changed: orders files whose closing nobody saw.
    """

    name: str
    fingerprint: Fingerprint
    status_changed_ns: int
    is_settled: bool

    def order(self, touched: Container[int]) -> tuple[int, int, str]:
        """Sorts by the last change, and data before a marker that was written in the same tick of the clock.

        Args:
            touched: inodes whose links we have changed; there the last write counts.
        """
        is_touched = self.fingerprint.inode in touched
        changed_ns = self.fingerprint.changed_ns if is_touched else self.status_changed_ns
        return changed_ns, -self.fingerprint.num_bytes, self.name


def is_settled(info: os.stat_result, now_ns: int) -> bool:
    """Whether any later write would show in the file's time; a time in the future counts as settled."""
    return not 0 <= now_ns - info.st_mtime_ns < SETTLE_NS


def is_being_written(fd: int) -> bool:
    """Whether anybody on this host has the file open, or mapped, for writing.

    Asked by taking a read lease for a moment, which the kernel refuses exactly then; it also counts
    writers of other users and containers. Where leases are not to be had (files of others, some file
    systems), a file that was changed within two seconds counts as being written.

    Args:
        fd: open for reading only.
    """
    try:
        # A lease that is broken sends SIGIO, which ends a process; SIGURG is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        return -_UNTOLD_S < time.time() - os.fstat(fd).st_mtime < _UNTOLD_S
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def open_file(path: Path) -> int:
    """Open a file to look at it: no link is followed, and a pipe does not block."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def is_open_now(path: Path) -> bool:
    """`is_being_written` for a path; False if there is no such file or it cannot be opened."""
    try:
        fd = open_file(path)
    except OSError:
        return False
    try:
        return is_being_written(fd)
    finally:
        os.close(fd)


def walk(root: Path, skips: Callable[[str], bool], below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Name and look of everything below `root` that is no directory.

    Args:
        root: the directory.
        skips: whether a name is none of ours; what is below a directory of that kind is left out.
        below: only what is in this directory.
    """
    pending = [below]
    while pending:
        below = pending.pop()
        with (
            suppress(FileNotFoundError, NotADirectoryError, PermissionError),
            os.scandir(root / below) as all_,
        ):
            for one in all_:
                name = f"{below}/{one.name}" if below else one.name
                if skips(name):
                    continue
                if one.is_dir(follow_symlinks=False):
                    pending.append(name)
                else:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        yield name, one.stat(follow_symlinks=False)


def look(root: Path, skips: Callable[[str], bool], below: str = "") -> tuple[list[Found], dict[str, str]]:
    """The regular files that `walk` finds, and why each other thing there cannot be an object."""
    found, others = [], {}
    for name, info in walk(root, skips, below):
        if reason := why_no_object(info.st_mode) or why_no_name(name):
            others[name] = reason
        else:
            now_ns = time.time_ns()
            found.append(Found(name, Fingerprint.of(info), info.st_ctime_ns, is_settled(info, now_ns)))
    return found, others


def why_no_name(name: str) -> str:
    """Why no object can be called so; "" if one can."""
    try:
        check_name(name)
    except InvalidInput as error:
        return str(error)
    return ""


def why_no_object(mode: int) -> str:
    """Why what has this mode cannot be an object; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    if stat.S_ISLNK(mode):
        return "it is a symbolic link, which object stores do not have; write its target's name into a file"
    return "it is neither a file nor a directory"
