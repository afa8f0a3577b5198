"""Process exit that keeps its exit status while gloo ranks are alive."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(status: int = 0) -> NoReturn:
    """End this process now with `status`, after flushing its output and leaving the process group.

    A finished gloo process can be aborted by its own threads at interpreter exit, and then reports a failure
    that was none (SIGABRT, in up to half of all runs). This ending skips the interpreter's teardown, and with
    it `atexit` handlers: close loggers and files first. Never call it over an exception.

    Ranks: every rank calls it for itself.
    Blocks: until the process group is destroyed.
    Source: pytorch/pytorch#179291, #190489.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_status_at_exit: int | None = None


def leave_at_exit(status: int) -> None:
    """Have the interpreter's exit be a `leave`, after the handlers that others have registered since.

    For a process that an exception is to end with `status`, which its own threads could turn into a crash.
    """
    global _status_at_exit
    _status_at_exit = status


def _leave_if_asked() -> None:
    if _status_at_exit is not None:
        leave(_status_at_exit)


atexit.register(_leave_if_asked)  # now: handlers run backwards, and those of the user's libraries come first
