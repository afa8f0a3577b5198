"""Size of a log: recorded once a second while it grows, for the times of its lines, and limited on disk."""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_right
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.system.linux.files import punch_hole, write_atomic
from holdfast.system.units import parse_bytes

_SAMPLE = struct.Struct("<Qd")  # size of the log in bytes, and Unix time
_MAX_SIZE = 1 << 63
_MAX_BYTES = 16 << 20  # limit of the file: a million samples. Then every second one is left out.


def times_path(log: Path) -> Path:
    """Return the path of the times of a log."""
    return log.with_suffix(".times")


def add_sample(path: Path, size: int, unix_s: float) -> None:
    """Record the size of a log at a time."""
    if path.exists() and path.stat().st_size >= _MAX_BYTES:
        kept = read_samples(path, -1, _MAX_SIZE)[1::2]
        write_atomic(path, b"".join(_SAMPLE.pack(*sample) for sample in kept), is_durable=False)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, _SAMPLE.pack(size, unix_s))
    finally:
        os.close(fd)


def read_samples(path: Path, begin: int, end: int) -> list[tuple[int, float]]:
    """Return the sizes after `begin` with their times, up to the first size that is not less than `end`."""
    found: list[tuple[int, float]] = []
    try:
        with path.open("rb") as file:
            fd = file.fileno()
            places = range(0, os.fstat(fd).st_size // _SAMPLE.size * _SAMPLE.size, _SAMPLE.size)
            first = bisect_right(
                places, begin, key=lambda place: _SAMPLE.unpack(os.pread(fd, _SAMPLE.size, place))[0]
            )
            file.seek(first * _SAMPLE.size)
            while len(data := file.read(_SAMPLE.size)) == _SAMPLE.size:
                found.append(_SAMPLE.unpack(data))
                if found[-1][0] >= end:
                    break
    except FileNotFoundError:
        pass
    return found


LIMIT = "HOLDFAST_LOG_LIMIT"  # variable of the job with the bytes of output per node that are kept, or `none`
DEFAULT = "1GiB"
_PAGE_BYTES = 4096
_MAX_HEAD_BYTES = 64 << 20


def limit_bytes(value: str) -> int | None:
    """Return the limit that the variable sets, or None for no limit."""
    if value.strip().lower() == "none":
        return None
    number = parse_bytes(value, LIMIT)
    if number < 1 << 20:
        raise InvalidInput(f"{LIMIT} must be at least 1MiB, got {value!r:.100}.")
    return number


def hole(size: int, limit: int) -> tuple[int, int]:
    """Return offset and length of the part that a too long log loses: not the beginning and the last half."""
    head = min(_MAX_HEAD_BYTES, limit // 4)
    begin = -(-head // _PAGE_BYTES) * _PAGE_BYTES
    end = (size - limit // 2) // _PAGE_BYTES * _PAGE_BYTES
    return begin, max(0, end - begin)


class LogSampler:
    """Sampler of one node's log, for the process that runs the node."""

    def __init__(self, log: Path, fd: int, limit: str) -> None:
        self._times = times_path(log)
        self._fd = fd
        self._size = os.fstat(fd).st_size
        try:
            self._limit = limit_bytes(limit)
        except InvalidInput as error:
            self._limit = limit_bytes(DEFAULT)
            self._write(f"{error} The limit is {DEFAULT}.")

    def poll(self) -> None:
        """Record a changed size, and remove the middle of a log that is too long."""
        status = os.fstat(self._fd)
        if status.st_size == self._size:
            return
        if status.st_size < self._size:  # emptied by its owner: the sizes must grow
            self._times.unlink(missing_ok=True)
        self._size = status.st_size
        try:
            add_sample(self._times, status.st_size, time.time())
            if self._limit is not None and status.st_blocks * 512 > self._limit:  # on disk
                begin, num_bytes = hole(status.st_size, self._limit)
                if num_bytes:
                    punch_hole(self._fd, begin, num_bytes)
        except OSError as error:
            self._write(f"this log is not limited, because its file system refused: {error}")
            self._limit = None

    def _write(self, text: str) -> None:
        os.write(self._fd, f"holdfast: {text}\n".encode())
