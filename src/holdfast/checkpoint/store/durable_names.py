"""Durable names: directories whose entries this process has made durable, each once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.store.lookup import O_PATH, open_below

_CANNOT_FSYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EROFS)
_MAX_DURABLE = 64


class DurableNames:
    """Directories of one store whose names are durable.

    Args:
        root: of the store, with symbolic links resolved.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._durable: dict[str, tuple[int, int]] = {}  # device and inode by folder

    def forget(self, level: str) -> None:
        """Forget a folder that was removed."""
        self._durable.pop(level, None)

    def sync_up(self, root: int, folder: str) -> None:
        """Make the names of a folder, of its parents and of the root durable.

        Each level once, whoever created it: another process may have, without having reached its fsync. Twice
        would double the time of a small put, since even an fsync without changes flushes the disk's cache.
        """
        for level in levels(folder):
            info = os.stat(level, dir_fd=root, follow_symlinks=False)
            if self._durable.get(level) != (info.st_dev, info.st_ino):
                with opened_for_sync(root, folder_of(level)) as above:
                    sync_names(above)
                self._remember(level, info)
        info = os.fstat(root)
        if self._durable.get("") != (info.st_dev, info.st_ino):
            for level in self._root.parents:  # whoever created them; above a mount point nothing is ours
                if level.stat().st_dev != info.st_dev and level != self._root.parent:
                    break
                sync_directory(level)
            self._remember("", info)

    def _remember(self, level: str, info: os.stat_result) -> None:
        if len(self._durable) >= _MAX_DURABLE:
            self._durable.clear()
        self._durable[level] = info.st_dev, info.st_ino


def folder_of(name: str) -> str:
    """Return the part of a name before its last slash, or "" for the root."""
    return name.rpartition("/")[0]


def levels(folder: str) -> Iterator[str]:
    """Yield a folder and its parents, without the root."""
    while folder:
        yield folder
        folder = folder_of(folder)


def open_for_sync(root: int, folder: str) -> int:
    """Open a folder below the root, for an fsync of its names."""
    try:
        return open_below(root, folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be entered but not read; this is the only way to sync it
        return open_below(root, folder, O_PATH | os.O_DIRECTORY)


@contextmanager
def opened_for_sync(root: int, folder: str) -> Iterator[int]:
    """Open a folder below the root for the block."""
    fd = open_for_sync(root, folder)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_names(folder_fd: int) -> None:
    """Make the names in an open folder durable."""
    with ignoring(*_CANNOT_FSYNC):  # some FUSE file systems have no fsync for directories
        os.fsync(folder_fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory above the root durable."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        sync_names(fd)
    finally:
        os.close(fd)


@contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """Ignore errors of the operating system with these numbers in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
