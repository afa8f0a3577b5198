"""Wakeup pipe: a FIFO through which any process can wake a controller."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class WakeupPipe:
    """Controller's end of the FIFO, readable after a wakeup."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Opened for writing too: otherwise it would report end of file while it has no writer.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def clear(self) -> None:
        """Discard pending wakeups. Check for changes after this call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        """Close the FIFO."""
        os.close(self.fd)


def wake(path: Path) -> None:
    """Wake the controller, if there is one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # there is no controller, and the next one checks everything when it starts
    with contextlib.suppress(OSError):
        os.write(fd, b"!")
    os.close(fd)
