"""A program that imitates another operating system: `other_system.py PLATFORM CODE [MODULE ...]`.

It sets `sys.platform`, and takes away the functions and constants that Python has on Linux only, and /proc.
Differences in the behaviour of the calls that both systems have are not imitated.
"""

from __future__ import annotations

import builtins
import fcntl
import importlib
import io
import mmap
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

LINUX_ONLY = {
    os: "memfd_create pidfd_open O_PATH O_DIRECT O_TMPFILE sched_getaffinity sched_setaffinity eventfd "
    "copy_file_range splice posix_fadvise posix_fallocate fdatasync SEEK_DATA SEEK_HOLE setns unshare",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_SETLEASE F_GETLEASE F_NOTIFY F_ADD_SEALS F_SETPIPE_SZ",
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE",
    resource: "prlimit RUSAGE_THREAD",
    select: "epoll",
    signal: "pidfd_send_signal sigwaitinfo sigtimedwait",
    socket: "SO_PEERCRED SCM_CREDENTIALS SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK",
}
"""Names that Python has on Linux and not on macOS, by module."""
NOT_ON_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios")
"""Modules that Python does not have on Windows."""


def imitate(platform: str) -> None:
    """Take away from this process everything that Python does not have on another operating system."""
    sysconfig.get_config_vars()
    sys.platform = platform
    for module, names in LINUX_ONLY.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in NOT_ON_WINDOWS if platform == "win32" else ():
        sys.modules[name] = None  # type: ignore[assignment] - an import of it fails
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir")):
        setattr(module, name, without_proc(getattr(module, name)))


def without_proc(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the file system that does not find /proc and /sys."""

    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return real(path, *args, **options)

    return call


if __name__ == "__main__":
    _, platform, code, *modules = sys.argv
    for name in modules:  # these exist for each system, and would notice the imitation at their import
        importlib.import_module(name)
    imitate(platform)
    exec(code)
