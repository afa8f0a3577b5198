"""Roles: processes of a job that run at most once, each under a lock, and are replaced when they are dead."""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import STATE, JobFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.processes import ROLES
from holdfast.jobs.node.virtual_environment import own_python
from holdfast.system import backoff
from holdfast.system.entry import command
from holdfast.system.environment import NOTIFY, NOTIFY_ON
from holdfast.system.linux import locks
from holdfast.system.linux.wakeup_pipe import wake

STOPPED = "stopped"  # file in the folder of an attempt that is being killed
_PATH = "PYTHONPATH"
_DEFAULT_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_POLL_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_STARTS = 3  # limit of starts of a process that dies before it is ready


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """Process of a job that runs at most once."""

    name: str  # as `python -m holdfast.jobs` expects it
    folder: Path  # in which it works
    lock: Path  # which it holds as long as it lives

    @property
    def is_alive(self) -> bool:
        """True if the process is running."""
        return locks.is_held(self.lock)

    def start(
        self,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> bool:
        """Start the process, unless it is running. Return True if it was started."""
        lock = locks.acquire(self.lock)
        if lock is None:
            return False
        try:
            before()
            spawn(self.name, self.folder, log, lock=lock, environment=environment)
        finally:
            os.close(lock)
        return True

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it is gone."""
        processes.kill(processes.of_role(self.name, self.folder))


def spawn(
    role: str, folder: Path, log: Path, *, lock: int, environment: Mapping[str, str] | None = None
) -> int:
    """Start a process of Holdfast without a terminal, with a lock from the start, and return its pid."""
    given = os.environ if environment is None else environment
    kept = {name: value for name, value in given.items() if name not in (TAG, NOTIFY, NOTIFY_ON, _PATH)}
    # Not the job's PYTHONPATH, which may contain other versions of the modules imported here.
    kept |= {_PATH: os.environ[_PATH]} if _PATH in os.environ else {}
    python = own_python()
    return os.posix_spawn(
        python,
        command(ROLES, role, str(folder), python=python),
        kept,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, lock, locks.INHERITED_FD),
        ],
        setsid=True,  # a closed terminal or Ctrl-C does not reach it
        setsigmask=[],
        setsigdef=_DEFAULT_SIGNALS,
    )


def log_line(text: str) -> None:
    """Write a line to the log of the node that started this process."""
    sys.stdout.write(f"holdfast: {time.strftime('%F %T')} {text}\n")
    sys.stdout.flush()


def start_controller(folder: JobFolder) -> bool:
    """Start a controller, unless one is running. Return True if it was started."""
    environment = {**os.environ, STATE: str(folder.path.parents[1])}
    controller = ProcessRole("controller", folder.path, folder.lock)
    return controller.start(folder.controller_log, environment=environment)


def rouse_controller(folder: JobFolder) -> None:
    """Start a controller, or wake the one that is running."""
    if not start_controller(folder):
        wake(folder.wakeup)


class Lease(ABC):
    """Lease of an attempt on a process that serves its node: starts it, waits for it, replaces a dead one."""

    def __init__(self, attempt: Path, role: ProcessRole, ready: str) -> None:
        self._attempt, self._role, self._ready_text = attempt, role, ready
        self._again_s, self._num_starts = 0.0, 0

    def wait_until_ready(self, meanwhile: Callable[[], None]) -> str | None:
        """Wait until the process is ready, and return why it failed; None if it did not."""
        num_starts = 0
        while (error := self._result()) is None:
            if (self._attempt / STOPPED).exists():
                return f"the attempt was ended before {self._ready_text}"
            if self._start():
                num_starts += 1
            if num_starts > _MAX_STARTS:
                return f"the {self._role.name} died {_MAX_STARTS} times before {self._ready_text}"
            meanwhile()
            time.sleep(_POLL_S)
        return error or None

    def poll(self) -> None:
        """Replace a process that was killed."""
        if time.monotonic() >= self._again_s and self._start():
            self._num_starts += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_starts, _PAUSE_S, _LONGEST_PAUSE_S)

    @abstractmethod
    def close(self) -> None:
        """End the lease."""

    @abstractmethod
    def _result(self) -> str | None:
        """Return why the process failed, or an empty text if it is ready. None: it still starts."""

    @abstractmethod
    def _start(self) -> bool:
        """Start the process, unless it is running. Return True if it was started."""
