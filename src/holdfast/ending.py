"""Ends a process in the one way that keeps its exit status true when gloo ranks are alive."""

from __future__ import annotations

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
