"""Sampler of a growing log: records its size once a second, and keeps it within its limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.jobs.output import log_limit
from holdfast.jobs.output.log_times import add_sample, times_path


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
