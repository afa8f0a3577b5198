"""Starts our own processes: each knows its role and folder, has the lock it was handed, needs no terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.entry import command
from holdfast.jobs.environment import MARK
from holdfast.jobs.node import locks
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.place import STATE

_PATH = "PYTHONPATH"


def spawn(
    role: str,
    folder: Path,
    *,
    log: Path,
    entry: str = "holdfast.jobs.node",
    lock: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Start a process of ours, and return its pid.

    Args:
        role: as the entry has it.
        folder: what it is to look after.
        log: where its output goes.
        entry: the module that is run.
        lock: descriptor of a lock that it is to hold from its first moment on.
        environment: all its variables; by default those of this process.
    """
    handed = [(os.POSIX_SPAWN_DUP2, lock, locks.HANDED_FD)] if lock is not None else []
    return os.posix_spawn(
        sys.executable,
        command(entry, role, str(folder)),
        own_environment(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *handed,
        ],
        setsid=True,  # neither a closed terminal nor Ctrl-C reaches it
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
    )


def look_after(folder: JobFolder) -> bool:
    """Start a controller, unless there is one; it has its lock from the first moment on.

    Returns:
        True if there was none.
    """
    lock = locks.take(folder.lock)
    if lock is None:
        return False
    state = folder.path.parents[1]
    try:
        spawn(
            "controller",
            folder.path,
            log=folder.controller_log,
            entry="holdfast.jobs.local",
            lock=lock,
            environment={**os.environ, STATE: str(state)},
        )
    finally:
        os.close(lock)
    return True


def own_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of our own processes, which are in no node.

    Args:
        environment: what it is made from; by default that of this process.
    """
    given = os.environ if environment is None else environment
    kept = {name: value for name, value in given.items() if name not in (MARK, _PATH)}
    # Not the job's own path: it may hold other versions of what we import.
    return {**kept, _PATH: os.environ[_PATH]} if _PATH in os.environ else kept
