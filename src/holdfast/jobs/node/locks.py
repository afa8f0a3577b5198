"""Locks that live as long as their holder: who can take one knows that the holder is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

# Locks of open file descriptions: like those of flock(2) they pass to whom the descriptor is handed, and end
# with its last copy. Unlike those they can be asked about without being taken, which would be in the way of
# whoever wants to take one at that moment.
_FLOCK = "hhqqi"  # type, whence, start, length, pid
_WHOLE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

HANDED_FD = 3
"""Descriptor as which a new process finds the lock that it was handed."""


def take(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed everywhere; None if somebody else holds it."""
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
    """True if somebody holds the lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE)
    finally:
        os.close(fd)
    return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK


def keep_handed() -> int:
    """In a new process: keep the lock that was handed to it, and hand it to nobody else."""
    os.set_inheritable(HANDED_FD, False)
    return HANDED_FD
