"""Makes system calls on files below a folder fail, in every Python process that finds this file.

Environment: `FAULTS_BELOW` the folder. Either `FAULTS_SHARE`, the share of calls that fail at random, with
`FAULTS_SEED`; or `FAULTS_AT`, the number of the one call that fails, counted over all processes, with
`FAULTS_ERROR`, the name of its error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from collections.abc import Callable
from typing import Any

_below = os.environ.get("FAULTS_BELOW", "")
_share = float(os.environ.get("FAULTS_SHARE", "0"))
_at = int(os.environ.get("FAULTS_AT", "-1"))
_error = getattr(errno, os.environ.get("FAULTS_ERROR", "ESTALE"))
_dice = random.Random(f"{os.environ.get('FAULTS_SEED')}-{os.getpid()}-{time.time_ns()}")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EMFILE)
_open, _write, _close, _readlink = os.open, os.write, os.close, os.readlink
_pread, _pwrite = os.pread, os.pwrite


def _is_below(one: Any) -> bool:
    if isinstance(one, (str, os.PathLike)):
        return os.fspath(one).startswith(_below)
    try:
        return isinstance(one, int) and _readlink(f"/proc/self/fd/{one}").startswith(_below)
    except OSError:
        return False


def _count(kind: str) -> None:
    log = _open(f"{_below}.faults", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _write(log, f"{kind}\n".encode())
    _close(log)


def _next_number() -> int:
    """Return the number of this call among those of all processes."""
    log = _open(f"{_below}.calls", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(log, fcntl.LOCK_EX)
        number = int(_pread(log, 20, 0) or b"0")
        _pwrite(log, f"{number + 1:020d}".encode(), 0)
        return number
    finally:
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


def _fails_once(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return the call, which fails if its number is that of the environment."""

    def act(*args: Any, **more: Any) -> Any:
        if any(map(_is_below, (*args[:2], *more.values()))) and _next_number() == _at:
            _count(f"{kind}: {errno.errorcode[_error]}")
            raise OSError(_error, os.strerror(_error))
        return call(*args, **more)

    return act


if _below and _at >= 0:
    _NAMES = (
        *("open", "stat", "lstat", "fstat", "statvfs", "mkdir", "rmdir", "scandir", "listdir", "replace"),
        *("rename", "link", "unlink", "read", "pread", "preadv", "write", "pwrite", "fsync"),
    )
    for name in _NAMES:
        setattr(os, name, _fails_once(getattr(os, name), name))
elif _below and _share:
    for name in ("fsync", "preadv", "link", "replace", "unlink", "scandir"):
        setattr(os, name, _faulty(getattr(os, name), name))
    for name in ("pwrite", "write"):
        setattr(os, name, _faulty(getattr(os, name), name, may_be_short=True))
