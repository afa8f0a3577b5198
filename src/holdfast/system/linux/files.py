"""Files that appear whole or not at all; reads that cannot block; reserved space."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from holdfast.system.linux.partial_files import partial_file

NOT_A_FILE = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL),
        *(errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG),
    }
)
"""Error numbers of `open_regular` for a path without a regular file. Others are failures to read it."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A FIFO in its place does not block."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - returned
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file for the block, by flags of open(2), and yield its descriptor. A new file is private."""
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def write_atomic(path: Path, data: str | bytes, *, is_durable: bool = True) -> None:
    """Write a private file atomically, replacing any existing one; durable contents survive a power cut."""
    with partial_file(path) as partial:
        with partial.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)


def reserve_space(fd: int, offset: int, num_bytes: int) -> None:
    """Reserve disk space for a part of a file, also beyond its end; its size stays (fallocate(2))."""
    _fallocate(fd, _KEEP_SIZE, offset, num_bytes)


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give a part of a file back to the file system. Its writers, which append, and its readers continue."""
    _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes)


def _fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> None:
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
