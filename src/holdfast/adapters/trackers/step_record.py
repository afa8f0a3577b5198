"""Record of the newest step that a tracker has logged: a small file that survives the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from holdfast.adapters.trackers.newest_steps import NONE
from holdfast.errors import Corrupt

_DIGITS = 20
"""Digits of a step, so that each write replaces all bytes of the one before."""


@final
class StepRecord:
    """Newest step of a run in a file. A step is recorded before its row is logged.

    The file survives the end of the process, not a power loss: it is not flushed for each row.

    Args:
        path: the file, which is made if it does not exist.

    Attributes:
        step: newest recorded step; `NONE` without any.

    Raises:
        Corrupt: the file has other contents.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        found = os.pread(self._fd, _DIGITS + 2, 0)
        if found and not (len(found) == _DIGITS + 1 and found[:-1].isdigit() and found.endswith(b"\n")):
            raise Corrupt(
                f"{path} should have one step of {_DIGITS} digits, and has {found!r}. Nothing was logged. "
                "Without the file, the steps since the last checkpoint are logged again: delete it to accept "
                "that."
            )
        self.step = int(found) if found else NONE

    def raise_to(self, step: int) -> None:
        """Record a newer step.

        Raises:
            OSError: the file cannot be written.
        """
        os.pwrite(self._fd, b"%0*d\n" % (_DIGITS, step), 0)
        self.step = step

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)
