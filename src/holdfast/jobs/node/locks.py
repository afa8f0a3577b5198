"""File locks that are released when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

# Locks of open file descriptions: like those of flock(2) they are inherited with the descriptor, and are
# released with its last copy. Unlike those they can be tested without being acquired, which would disturb a
# process that acquires one at that moment.
_FLOCK = "hhqqi"  # type, whence, start, length, pid
_WHOLE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

INHERITED_FD = 3
"""Descriptor of an inherited lock in a new process."""


def take(path: Path) -> int | None:
    """Acquire a lock, and return a descriptor that holds it. Return None if it is held already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return None
    return fd


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


def keep_inherited() -> int:
    """Keep an inherited lock, without passing it on to child processes."""
    os.set_inheritable(INHERITED_FD, False)
    return INHERITED_FD
