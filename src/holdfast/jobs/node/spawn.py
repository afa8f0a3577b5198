"""Start of Holdfast's own processes, with a role, a folder, and an inherited lock."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.parent_python import own_python
from holdfast.jobs.state_folder import STATE
from holdfast.system.entry import command
from holdfast.system.environment import NOTIFY, NOTIFY_ON
from holdfast.system.linux import locks

_PATH = "PYTHONPATH"


def spawn(
    role: str,
    folder: Path,
    *,
    log: Path,
    lock: int,
    entry: str = "holdfast.jobs.node",
    environment: Mapping[str, str] | None = None,
) -> int:
    """Start a process, and return its pid. It has no terminal.

    Args:
        role: role, as the entry module expects.
        log: file for its output.
        lock: descriptor of a lock that it holds from the start.
        environment: all its variables. Default: those of this process.
    """
    python = own_python()
    return os.posix_spawn(
        python,
        command(entry, role, str(folder), python=python),
        own_environment(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, lock, locks.INHERITED_FD),
        ],
        setsid=True,  # a closed terminal or Ctrl-C does not reach it
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
    )


def spawn_once(
    role: str,
    folder: Path,
    *,
    log: Path,
    lock: Path,
    entry: str = "holdfast.jobs.node",
    environment: Mapping[str, str],
) -> bool:
    """Start a process that holds a lock, unless one does already. Return True if it was started."""
    fd = locks.acquire(lock)
    if fd is None:
        return False
    try:
        spawn(role, folder, log=log, lock=fd, entry=entry, environment=environment)
    finally:
        os.close(fd)
    return True


def start_controller(folder: JobFolder) -> bool:
    """Start a controller, unless one is running. Return True if it was started."""
    return spawn_once(
        "controller",
        folder.path,
        log=folder.controller_log,
        lock=folder.lock,
        entry="holdfast.jobs.local",
        environment={**os.environ, STATE: str(folder.path.parents[1])},
    )


def own_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of Holdfast's own processes, which do not belong to a node.

    Args:
        environment: environment to start from. Default: that of this process.
    """
    given = os.environ if environment is None else environment
    kept = {name: value for name, value in given.items() if name not in (TAG, NOTIFY, NOTIFY_ON, _PATH)}
    # Not the job's PYTHONPATH, which may contain other versions of the modules imported here.
    return {**kept, _PATH: os.environ[_PATH]} if _PATH in os.environ else kept
