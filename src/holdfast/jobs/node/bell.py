"""A bell: whoever has something for a controller to see rings it, and the controller waits for that."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Bell:
    """The controller's end of the FIFO; readable when it was rung."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing too: else it would be at its end whenever nobody holds the other end.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def hush(self) -> None:
        """Take all ringing so far for heard; what it was about is looked for after this."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        """Listen no more."""
        os.close(self.fd)


def ring(path: Path) -> None:
    """Ring; where nobody listens, or has too much to hear already, nothing happens."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # no controller; the next one looks at everything when it begins
    with contextlib.suppress(OSError):
        os.write(fd, b"!")
    os.close(fd)
