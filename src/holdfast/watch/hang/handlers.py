"""Signal handlers of a trainer, which need no GIL: one writes the stacks of all threads, one exits."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from dataclasses import dataclass

from holdfast.errors import HUNG_STATUS
from holdfast.system.linux.processes import handles_signal

NAME = "hang"
"""Name of the watch. The first of its words in the pulse is one more than the descriptor for stacks."""
STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Signal that has a trainer write its stacks. Real-time signals are hardly used by other libraries."""
EXIT_SIGNAL = HUNG_STATUS
"""Signal that ends a trainer at once. Its handler is the C function _exit, so its number is the status."""


@dataclass(slots=True)
class _Installed:
    """Handlers of this process."""

    pid: int
    stacks_fd: int


_installed: _Installed | None = None


def install_handlers() -> int:
    """Install both handlers, once per process, unless something else handles their signals.

    Returns:
        The descriptor of the file that receives the stacks; -1 without one.
    """
    global _installed
    if _installed is None or _installed.pid != os.getpid():
        _installed = _Installed(os.getpid(), _install())
    return _installed.stacks_fd


def _install() -> int:
    pid = os.getpid()
    if not handles_signal(pid, EXIT_SIGNAL):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
        libc.signal.restype = ctypes.c_void_p
        libc.signal(EXIT_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))
    if handles_signal(pid, STACKS_SIGNAL):
        return -1
    fd = os.memfd_create("holdfast-stacks")
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    return fd
