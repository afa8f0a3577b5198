"""Limit of a log's size on disk: the middle of a long log is removed while the job writes its end."""

from __future__ import annotations

import ctypes
import os

from holdfast.errors import InvalidInput
from holdfast.system.units import parse_bytes

LIMIT = "HOLDFAST_LOG_LIMIT"
"""Variable of the job with the most bytes of output per node that are kept, or `none`."""
DEFAULT = "1GiB"
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # of fallocate(2)
_PAGE_BYTES = 4096
_MAX_HEAD_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def limit_bytes(value: str) -> int | None:
    """Return the limit that the variable sets, or None for no limit.

    Raises:
        InvalidInput: the value is not a size.
    """
    if value.strip().lower() == "none":
        return None
    number = parse_bytes(value, LIMIT)
    if number < 1 << 20:
        raise InvalidInput(f"{LIMIT} must be at least 1MiB, got {value!r:.100}.")
    return number


def hole(size: int, limit: int) -> tuple[int, int]:
    """Return offset and length of the part that a too long log loses; pure.

    The beginning stays, at most 64 MiB, and the last half of the limit.
    """
    head = min(_MAX_HEAD_BYTES, limit // 4)
    begin = -(-head // _PAGE_BYTES) * _PAGE_BYTES
    end = (size - limit // 2) // _PAGE_BYTES * _PAGE_BYTES
    return begin, max(0, end - begin)


def is_reached(status: os.stat_result, limit: int) -> bool:
    """Return True if a log takes more space on disk than the limit."""
    return status.st_blocks * 512 > limit


def punch(fd: int, begin: int, num_bytes: int) -> None:
    """Give a part of a file back to the file system. Its size and the offsets of the rest stay.

    Writers that append to it, and readers, continue unaware.

    Raises:
        OSError: the file system cannot do that.
    """
    arguments = (_PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(num_bytes))
    if _libc.fallocate(fd, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
