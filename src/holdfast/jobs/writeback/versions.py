"""Versions of closed files, kept until they are uploaded."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.format.hashes import digest
from holdfast.jobs.writeback.files import FOR_INSPECTION, SETTLE_NS, Fingerprint, is_being_written, is_settled
from holdfast.jobs.writeback.journal import FOLDER
from holdfast.jobs.writeback.upload_queue import COPY, HARD_LINK, PATH, Version
from holdfast.system.failpoint import failpoint
from holdfast.system.linux.files import opened

_CLONE = 0x40049409  # FICLONE: an ioctl that lets two files share blocks until one is written
_CANNOT_CLONE = (errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.EPERM, errno.EBADF)
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT)


class KeptVersions:
    """Kept versions of one directory's files, each under the number of its upload.

    A small file is copied. A larger one is cloned or, if the file system cannot do so, hard-linked: such a
    version survives deletion and replacement of the file, but not a write in place.
    """

    def __init__(self, directory: Path, copy_bytes: int) -> None:
        self._directory, self._copy_bytes = directory, copy_bytes
        self._folder = directory / FOLDER / "kept"
        self._folder.mkdir(exist_ok=True)
        self._can_clone = True

    def path(self, number: int, name: str, form: str) -> Path:
        """Return the path of a version's bytes."""
        return self._directory / name if form == PATH else self._folder / str(number)

    def capture(self, number: int, name: str, fd: int, is_closed_again: Callable[[], bool]) -> Version | None:
        """Keep a file as it was when it was closed, under the number of the future upload.

        Return None if the file is being written or, by `is_closed_again` after it was read, was closed again:
        a later event covers that.
        """
        if is_being_written(fd):
            return None
        info = os.fstat(fd)
        if info.st_size > self._copy_bytes and self._can_clone:
            # Any later write must change the file's time: a clone cannot be compared with it, unlike a copy.
            while not is_settled(info := os.fstat(fd), time.time_ns()):
                time.sleep(SETTLE_NS / 4e9)
        if info.st_size <= self._copy_bytes:
            version = self._copy(number, fd)
        else:
            version = self._clone(number, fd) or self._link(number, name, fd)
        if version.form == COPY:
            after = os.fstat(fd)
            is_other = (after.st_size, after.st_mtime_ns) != (info.st_size, info.st_mtime_ns)
            # The file has no writer now: whoever wrote after the event has closed it, which is queued.
            if is_other or is_being_written(fd) or is_closed_again():
                self.drop(number)
                return None
        failpoint("writeback.captured")
        return version

    def drop(self, number: int) -> None:
        """Delete a kept version."""
        (self._folder / str(number)).unlink(missing_ok=True)

    def sweep(self, needed: set[int]) -> set[int]:
        """Delete versions whose upload is not in the journal, left by a kill.

        Return the inodes of files whose links changed: their ctime does not show whether their contents did.
        """
        touched = set()
        for path in self._folder.iterdir():
            if not path.name.isdecimal() or int(path.name) not in needed:
                touched.add(path.stat().st_ino)
                path.unlink(missing_ok=True)
        return touched

    def exclusive_bytes(self, number: int) -> int:
        """Return the disk space used only by this upload, whose file was replaced or deleted."""
        with suppress(FileNotFoundError):
            info = (self._folder / str(number)).stat()
            return info.st_size if info.st_nlink == 1 and info.st_size > self._copy_bytes else 0
        return 0

    def _copy(self, number: int, fd: int) -> Version:
        fingerprint = Fingerprint.now(fd)
        with open(fd, "rb", buffering=0, closefd=False) as file:
            data = file.readall()  # another size than that of the fingerprint is detected later
        try:
            (self._folder / str(number)).write_bytes(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.drop(number)
            return Version(PATH, fingerprint)
        return Version(COPY, fingerprint, digest(data))

    def _clone(self, number: int, fd: int) -> Version | None:
        if not self._can_clone:
            return None
        fingerprint = Fingerprint.now(fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        copy = os.open(self._folder / str(number), flags, 0o600)
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
        return Version(COPY, fingerprint)

    def _link(self, number: int, name: str, fd: int) -> Version:
        fingerprint = Fingerprint.now(fd)
        self.drop(number)
        try:
            (self._folder / str(number)).hardlink_to(self._directory / name)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            return Version(PATH, fingerprint)
        with opened(self._folder / str(number), FOR_INSPECTION) as held:
            # The name may refer to another file since `fd` was opened.
            return Version(HARD_LINK, Fingerprint.now(held))
