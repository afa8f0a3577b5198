"""State of files: fingerprints, open writers, and a scan of the directory."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.store.contract import check_name
from holdfast.errors import InvalidInput
from holdfast.system.linux.files import opened

SETTLE_NS = 20_000_000  # after it, a further write is sure to change the mtime, which ticks every 10 ms
UNSETTLED = -1  # `changed_ns` of a file that was read too soon after a write. It matches nothing.
NameTest: TypeAlias = "Callable[[str], bool]"
FOR_INSPECTION = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # without following links, or blocking on a pipe
_UNKNOWN_S = 2.0  # without leases, a file that changed less long ago counts as open


class Fingerprint(Struct, frozen=True):
    """State of a file by size, time and inode. Compare with `matches`."""

    num_bytes: int
    changed_ns: int  # time of the last write, or `UNSETTLED` if another write could have the same time
    inode: int

    @classmethod
    def of(cls, info: os.stat_result) -> Fingerprint:
        """Return the fingerprint of a file's state."""
        return cls(info.st_size, info.st_mtime_ns, info.st_ino)

    @classmethod
    def now(cls, fd: int) -> Fingerprint:
        """Return the fingerprint of an open file. If it was written just before, it matches no other."""
        now_ns, info = time.time_ns(), os.fstat(fd)
        found = cls.of(info)
        return found if is_settled(info, now_ns) else replace(found, changed_ns=UNSETTLED)

    def matches(self, other: Fingerprint) -> bool:
        """Return True if both fingerprints are certainly of the same bytes."""
        return self == other and self.changed_ns != UNSETTLED


class ScannedFile(Struct, frozen=True):
    """Regular file of the directory."""

    name: str
    fingerprint: Fingerprint
    status_changed_ns: int  # ctime, by which files are sorted whose closing was not observed
    is_settled: bool

    @classmethod
    def of(cls, name: str, info: os.stat_result) -> ScannedFile:
        """Return a file with its present state."""
        return cls(name, Fingerprint.of(info), info.st_ctime_ns, is_settled(info, time.time_ns()))

    def order(self, touched: Container[int]) -> tuple[int, int, str]:
        """Return a sort key: the last change, with data before a marker written in the same clock tick.

        Of inodes whose links Holdfast has touched, the last write counts.
        """
        is_touched = self.fingerprint.inode in touched
        changed_ns = self.fingerprint.changed_ns if is_touched else self.status_changed_ns
        return changed_ns, -self.fingerprint.num_bytes, self.name


def is_settled(info: os.stat_result, now_ns: int) -> bool:
    """Return True if any later write would change the file's time. Times in the future count as settled."""
    return not 0 <= now_ns - info.st_mtime_ns < SETTLE_NS


def is_being_written(fd: int) -> bool:
    """Return True if a process on this host may write the file, in any container.

    Takes a read lease for a moment, which the kernel refuses in exactly that case. Where leases are
    unavailable, a file that changed within the last two seconds counts as being written.
    """
    try:
        # Breaking a lease sends SIGIO, which ends a process. SIGURG is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        return -_UNKNOWN_S < time.time() - os.fstat(fd).st_mtime < _UNKNOWN_S
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_open_now(path: Path) -> bool:
    """Return `is_being_written` for a path, or False if the file cannot be opened."""
    with suppress(OSError), opened(path, FOR_INSPECTION) as fd:
        return is_being_written(fd)
    return False


def scan(root: Path, is_excluded: NameTest, below: str = "") -> tuple[list[ScannedFile], dict[str, str]]:
    """Return the regular files below `root`, and why each other entry cannot be uploaded."""
    found, others, pending = [], {}, [below]
    while pending:
        below = pending.pop()
        with (
            suppress(FileNotFoundError, NotADirectoryError, PermissionError),
            os.scandir(root / below) as all_,
        ):
            for entry in all_:
                name = f"{below}/{entry.name}" if below else entry.name
                if is_excluded(name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(name)
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    info = entry.stat(follow_symlinks=False)
                    if reason := type_problem(info.st_mode) or name_problem(name):
                        others[name] = reason
                    else:
                        found.append(ScannedFile.of(name, info))
    return found, others


def name_problem(name: str) -> str:
    """Return why no object can have this name, or an empty string."""
    try:
        check_name(name)
    except InvalidInput as error:
        return str(error)
    return ""


def type_problem(mode: int) -> str:
    """Return why a file of this mode cannot be uploaded. Empty for regular files."""
    if stat.S_ISREG(mode):
        return ""
    if stat.S_ISLNK(mode):
        what = "it is a symbolic link, which object stores do not support"
        return f"{what}; write the target's name into a file"
    return "it is neither a file nor a directory"
