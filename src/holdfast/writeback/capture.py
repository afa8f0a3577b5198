"""Captures: keeps the version of a file that was just closed until it has been sent."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.format.hashes import digest
from holdfast.killpoint import kill_point
from holdfast.writeback.files import SETTLE_NS, Fingerprint, is_being_written, is_settled, open_file
from holdfast.writeback.journal import FOLDER
from holdfast.writeback.order import COPY, HOLD, PATH, Version

_CLONE = 0x40049409  # FICLONE: an ioctl by which two files share their blocks until one is written
_CANNOT_CLONE = (errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.EPERM, errno.EBADF)
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT)


class Captures:
    """The kept versions of one directory, each under the number of its entry.

    A small file is copied. A larger one is cloned where the file system can, else it gets a second name,
    which keeps it when the first is deleted or given to another file, but not when it is written in place.

    Args:
        directory: the write-back directory.
        copy_bytes: the largest file that is copied.
    """

    def __init__(self, directory: Path, copy_bytes: int) -> None:
        self._directory, self._copy_bytes = directory, copy_bytes
        self._folder = directory / FOLDER / "kept"
        self._folder.mkdir(exist_ok=True)
        self._can_clone = True

    def path(self, number: int, name: str, form: str) -> Path:
        """Where the bytes of an entry's version are."""
        return self._directory / name if form == PATH else self._folder / str(number)

    def take(self, number: int, name: str, fd: int, is_overtaken: Callable[[], bool]) -> Version | None:
        """Keep the file as it was when it was closed.

        Args:
            number: of the entry to be.
            name: of the file.
            fd: the file, open for reading.
            is_overtaken: whether it has been closed again meanwhile, asked after it was read.

        Returns:
            None if it is being written, or was closed again: another event tells of that.
        """
        if is_being_written(fd):
            return None
        info = os.fstat(fd)
        if info.st_size > self._copy_bytes and self._can_clone:
            info = _settled(fd)  # there is no second, cheap look at whether a clone is the same
        if info.st_size <= self._copy_bytes:
            version = self._copy(number, fd)
        else:
            version = self._clone(number, fd) or self._hold(number, name, fd)
        if version.form == COPY:
            after = os.fstat(fd)
            is_other = (after.st_size, after.st_mtime_ns) != (info.st_size, info.st_mtime_ns)
            # No writer now: whoever wrote since the event has closed, and that is in the queue.
            if is_other or is_being_written(fd) or is_overtaken():
                self.drop(number)
                return None
        kill_point("writeback.captured")
        return version

    def drop(self, number: int) -> None:
        """Keep an entry's version no longer."""
        (self._folder / str(number)).unlink(missing_ok=True)

    def sweep(self, needed: set[int]) -> set[int]:
        """Drop what a kill has left of entries that were not yet, or are no longer, in the journal.

        Returns:
            The inodes of files whose links changed by that, or shortly before the kill: the time of their
            last change is ours.
        """
        touched = set()
        for path in self._folder.iterdir():
            if not path.name.isdecimal() or int(path.name) not in needed:
                touched.add(path.stat().st_ino)
                path.unlink(missing_ok=True)
        return touched

    def is_kept(self, number: int) -> bool:
        """Whether there is a kept version of this number."""
        return (self._folder / str(number)).exists()

    def only_kept_bytes(self, number: int) -> int:
        """Bytes that stay on the disk only for this entry, since the directory has other ones by now."""
        with suppress(FileNotFoundError):
            info = (self._folder / str(number)).stat()
            return info.st_size if info.st_nlink == 1 and info.st_size > self._copy_bytes else 0
        return 0

    def _copy(self, number: int, fd: int) -> Version:
        now_ns, info = time.time_ns(), os.fstat(fd)
        data = bytearray(info.st_size)
        got, view = 0, memoryview(data)
        while got < len(data) and (more := os.preadv(fd, [view[got:]], got)):
            got += more
        del view
        del data[got:]  # it was cut off meanwhile: told by its size
        try:
            (self._folder / str(number)).write_bytes(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.drop(number)
            return Version(PATH, Fingerprint.of(info, now_ns=now_ns))
        return Version(COPY, Fingerprint.of(info, now_ns=now_ns), digest(data))

    def _clone(self, number: int, fd: int) -> Version | None:
        if not self._can_clone:
            return None
        now_ns, info = time.time_ns(), os.fstat(fd)
        copy = os.open(
            self._folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.ioctl(copy, _CLONE, fd)
        except OSError as error:
            self.drop(number)
            if error.errno in _CANNOT_CLONE:
                self._can_clone = False
                return None
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return None
            raise
        finally:
            os.close(copy)
        return Version(COPY, Fingerprint.of(info, now_ns=now_ns))

    def _hold(self, number: int, name: str, fd: int) -> Version:
        now_ns, info = time.time_ns(), os.fstat(fd)
        self.drop(number)
        try:
            (self._folder / str(number)).hardlink_to(self._directory / name)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            return Version(PATH, Fingerprint.of(info, now_ns=now_ns))
        held = open_file(self._folder / str(number))
        try:  # the name may have been given to another file since it was opened
            return Version(HOLD, Fingerprint.of(os.fstat(held), now_ns=now_ns))
        finally:
            os.close(held)


def _settled(fd: int) -> os.stat_result:
    """A look at a file, late enough that any later write shows in its time."""
    while not is_settled(info := os.fstat(fd), time.time_ns()):
        time.sleep(SETTLE_NS / 4e9)
    return info
