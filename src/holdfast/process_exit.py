"""Process exit that keeps its exit status while gloo ranks are alive."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def hard_exit(status: int = 0) -> NoReturn:
    """End this process with `status`, after flushing its output and destroying the process group.

    The threads of a finished gloo process can abort it at interpreter exit, and a complete run then looks
    failed (SIGABRT, in up to half of all runs). This skips the interpreter's teardown, and with it `atexit`
    handlers: close loggers and files first. Never call it while an exception is handled.

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


def hard_exit_at_exit(status: int) -> None:
    """End the interpreter by `hard_exit`, after the handlers that others register later.

    For an exception that is to end the process with `status`, which its threads could turn into a crash.
    """
    global _status_at_exit
    _status_at_exit = status


def _exit_if_set() -> None:
    if _status_at_exit is not None:
        hard_exit(_status_at_exit)


atexit.register(_exit_if_set)  # now: handlers run backwards, and those of the user's libraries come first
