"""Limit of a log on disk: the middle of a long log is removed, and its times are sampled as it grows."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.jobs.output import log_limit
from holdfast.jobs.output.log_times import add_sample, times_path
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
    """
    arguments = (_PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(num_bytes))
    if _libc.fallocate(fd, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class LogSampler:
    """Sampler of one node's log, for the process that runs the node.

    Args:
        log: path of the log.
        fd: the log, open for appending.
        limit: value of `HOLDFAST_LOG_LIMIT`.
    """

    def __init__(self, log: Path, fd: int, limit: str) -> None:
        self._times = times_path(log)
        self._fd = fd
        self._size = os.fstat(fd).st_size
        try:
            self._limit = log_limit.limit_bytes(limit)
        except InvalidInput as error:
            self._limit = log_limit.limit_bytes(log_limit.DEFAULT)
            self._write(f"{error} The limit is {log_limit.DEFAULT}.")

    def poll(self) -> None:
        """Record a changed size, and remove the middle of a log that is too long.

        A failure is written to the log once: it must not end the job.
        """
        status = os.fstat(self._fd)
        if status.st_size == self._size:
            return
        self._size = status.st_size
        try:
            add_sample(self._times, status.st_size, time.time())
            if self._limit is not None and log_limit.is_reached(status, self._limit):
                begin, num_bytes = log_limit.hole(status.st_size, self._limit)
                if num_bytes:
                    log_limit.punch(self._fd, begin, num_bytes)
        except OSError as error:
            self._write(f"this log is not limited, because its file system refused: {error}")
            self._limit = None

    def _write(self, text: str) -> None:
        os.write(self._fd, f"holdfast: {text}\n".encode())
