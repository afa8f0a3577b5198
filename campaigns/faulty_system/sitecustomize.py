"""Makes system calls on files below a folder fail at random, in every Python process that finds this file.

Environment: `FAULTS_BELOW` the folder, `FAULTS_SHARE` the share of calls that fail, `FAULTS_SEED`.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import Any

_below = os.environ.get("FAULTS_BELOW", "")
_share = float(os.environ.get("FAULTS_SHARE", "0"))
_dice = random.Random(f"{os.environ.get('FAULTS_SEED')}-{os.getpid()}-{time.time_ns()}")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EMFILE)


def _is_below(fd: Any) -> bool:
    try:
        return isinstance(fd, int) and _readlink(f"/proc/self/fd/{fd}").startswith(_below)
    except OSError:
        return False


def _count(kind: str) -> None:
    log = _open(f"{_below}.faults", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _write(log, f"{kind}\n".encode())
    _close(log)


def _faulty(call: Callable[..., Any], kind: str, *, may_be_short: bool = False) -> Callable[..., Any]:
    """Return the call with faults: an error, an error after the effect, a short write, or a pause."""

    def act(*args: Any, **more: Any) -> Any:
        fds = (args[0] if args else None, *more.values())
        if _dice.random() >= _share or not any(map(_is_below, fds)):
            return call(*args, **more)
        how = _dice.choice(("error", "lost answer", "slow", *(("short",) if may_be_short else ())))
        _count(f"{kind}: {how}")
        if how == "slow":
            time.sleep(_dice.uniform(0, 0.05))
            return call(*args, **more)
        if how == "short":
            fd, data, *rest = args
            return call(fd, memoryview(data)[: max(len(data) // 2 // 4096 * 4096, 1)], *rest)
        if how == "lost answer":
            call(*args, **more)
        number = _dice.choice(_ERRORS)
        raise OSError(number, os.strerror(number))

    return act


if _below and _share:
    _readlink, _open, _write, _close = os.readlink, os.open, os.write, os.close
    for name in ("fsync", "preadv", "link", "replace", "unlink", "scandir"):
        setattr(os, name, _faulty(getattr(os, name), name))
    for name in ("pwrite", "write"):
        setattr(os, name, _faulty(getattr(os, name), name, may_be_short=True))
