"""Locks of files, which the kernel releases when their last holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Two kinds. Those of flock(2) work on most network file systems. Those of open file descriptions, see
# fcntl(2), can be tested without being acquired, which would disturb a process that acquires one at that
# moment. Both are inherited with the descriptor, and released with its last copy.
_FLOCK = "hhqqi"  # type, whence, start, length, pid
_WHOLE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_NONE = struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)

INHERITED_FD = 3  # descriptor of an inherited lock in a new process


def try_flock(fd: int, *, is_shared: bool = False) -> bool:
    """Lock an open file, and return True. Return False if another process holds its lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def acquire(path: Path) -> int | None:
    """Acquire a lock, and return a descriptor that holds it. Return None if it is held already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_ours = _lock(fd)
    except OSError:
        os.close(fd)
        raise
    if not is_ours:
        os.close(fd)
        return None
    return fd


@contextmanager
def held(path: Path) -> Iterator[int | None]:
    """Hold a lock in the block, and yield its descriptor. Yield None if it is held already."""
    fd = acquire(path)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def is_held(path: Path) -> bool:
    """Return True if a process holds the lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE)
    finally:
        os.close(fd)
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK


def release_inherited() -> None:
    """Release an inherited lock, also for the other processes that have inherited it."""
    fcntl.fcntl(INHERITED_FD, fcntl.F_OFD_SETLK, _NONE)
    os.close(INHERITED_FD)


def retake_inherited() -> bool:
    """Hold an inherited lock, also if it was released meanwhile. Return False if another process holds it."""
    return _lock(INHERITED_FD)


def keep_inherited() -> int:
    """Keep an inherited lock, without passing it on to child processes."""
    os.set_inheritable(INHERITED_FD, False)
    return INHERITED_FD


def _lock(fd: int) -> bool:
    """Lock an open file, unless another one that was opened has the lock."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
