"""Process exit: background work is completed, and the exit status is kept while gloo ranks are alive."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from typing import TYPE_CHECKING, NoReturn, Protocol

from holdfast.errors import Preempted

if TYPE_CHECKING:
    from multiprocessing import util

EXIT_LIMIT_S = 60.0  # time that all background work together may take before the interpreter ends


class BackgroundWork(Protocol):
    """Owner of threads that must not be cut off by the end of the interpreter."""

    def end_with_interpreter(self, timeout_s: float) -> None:
        """Complete the work under way and join the threads, within `timeout_s`."""
        ...


# The threads hold their owners, so what is collected has none. The second set receives from the first.
_owners: tuple[weakref.WeakSet[BackgroundWork], weakref.WeakSet[BackgroundWork]] = (
    weakref.WeakSet(),
    weakref.WeakSet(),
)
_at_exit: list[util.Finalize] = []  # the call of `_complete_all`


def complete_at_exit(owner: BackgroundWork, *, is_receiver: bool = False) -> None:
    """Call `owner.end_with_interpreter` before the interpreter ends, however that comes.

    A daemon thread that returns from C++ after that aborts the process ("terminate called without an active
    exception"), and its work is lost.

    Args:
        is_receiver: other owners hand work over to it, so it ends after them.
    """
    _owners[is_receiver].add(owner)
    if not _at_exit:
        from multiprocessing import util  # which processes without such work need not import

        # Children that multiprocessing has forked call no handlers of atexit.
        _at_exit.append(util.Finalize(None, _complete_all, exitpriority=0))


def _complete_all() -> None:
    deadline = time.monotonic() + EXIT_LIMIT_S
    for owners in _owners:
        for owner in list(owners):
            owner.end_with_interpreter(max(0.0, deadline - time.monotonic()))


def _forget_all() -> None:
    for owners in _owners:
        owners.clear()
    _at_exit.clear()


def hard_exit(status: int = 0) -> NoReturn:
    """End this process with `status`, after flushing its output and destroying the process group.

    The threads of a finished gloo process can abort it at interpreter exit, and a complete run then looks
    failed (SIGABRT, in up to half of all runs). This skips the interpreter's teardown, and with it `atexit`
    handlers: close loggers and files first. Never call it while an exception is handled.

    Ranks: every rank calls it for itself.
    Blocks: until copies under way are complete, at most 60 s, and the process group is destroyed.
    Source: pytorch/pytorch#179291, #190489.
    """
    _complete_all()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_status_at_exit: int | None = None


def hard_exit_at_exit(status: int) -> None:
    """End the interpreter by `hard_exit`, after the handlers that others register later.

    For an exception that is to end the process with `status`, which its threads could turn into a crash.
    """
    global _status_at_exit
    _status_at_exit = status


def is_failure() -> bool:
    """Return True in a handler at exit if an error or a preemption ends the interpreter."""
    return Preempted.was_raised or hasattr(sys, "last_type")


def _exit_if_set() -> None:
    if _status_at_exit is not None:
        hard_exit(_status_at_exit)


os.register_at_fork(after_in_child=_forget_all)  # the threads, and what they own, are the parent's
atexit.register(_exit_if_set)  # now: handlers run backwards, and those of the user's libraries come first
atexit.register(_complete_all)  # before that one
