"""Kills of a process before one of its calls that change files."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CHANGES = ("fcntl.flock", "open", "os.", "socket.bind")
"""Beginnings of the names of Python's audit events of calls that change files or locks."""
ON_THE_WAY = "os.listdir", "os.scandir", "os.fork", "os.kill", "os.register_at_fork", "os.putenv"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def kill_before_change(number: int) -> None:
    """Have this process killed by SIGKILL before a change, counted from 1."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        is_read = event == "open" and not arguments[2] & WRITES
        if event.startswith(CHANGES) and event not in ON_THE_WAY and not is_read:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
