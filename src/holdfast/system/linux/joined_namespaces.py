"""Namespaces of another process, which this process can join: its file systems and its ids of users."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_USER, _MOUNTS = 0x10000000, 0x20000  # flags of setns(2)


@dataclass(frozen=True, slots=True)
class JoinedNamespaces:
    """Descriptors of namespaces, which keep them alive."""

    user: int | None  # None: that of this process
    mounts: int

    def close(self) -> None:
        """Release the namespaces."""
        for fd in (self.user, self.mounts):
            if fd is not None:
                os.close(fd)

    def join(self) -> None:
        """Move this process, of one thread, to the namespaces, as their root.

        Its current directory becomes their root directory.

        Source: setns(2), user_namespaces(7).
        """
        if self.user is not None:
            _setns(self.user, _USER)
        _setns(self.mounts, _MOUNTS)
        # Further groups are kept: files outside that are shared with a group stay accessible.
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def open_namespaces(pid: int) -> JoinedNamespaces:
    """Open the namespaces of a process.

    Raises:
        OSError: it has exited, or belongs to another user.
    """
    of_process = Path(f"/proc/{pid}/ns")
    is_own = (of_process / "user").stat().st_ino == Path("/proc/self/ns/user").stat().st_ino
    user = None if is_own else os.open(of_process / "user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return JoinedNamespaces(user, os.open(of_process / "mnt", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        if user is not None:
            os.close(user)
        raise


def _setns(fd: int, kind: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")
