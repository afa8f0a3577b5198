"""Servers: processes of a job that run at most once, each under a lock, and are replaced when dead."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
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


class Server:
    """Process of a role, which serves a folder: at most one, under a lock, and replaced when it is dead.

    Nodes that need it wait until it is ready, and poll it from then on.
    """

    before_ready = ""  # when a node that waits for it stops waiting, in messages

    def __init__(self, role: str, folder: Path, log: Path, *, lock: Path | None = None) -> None:
        self.role, self.folder, self.log = role, folder, log
        self._lock = lock or folder / "lock"
        self._again_s, self._num_starts = 0.0, 0

    @property
    def is_alive(self) -> bool:
        """True if the process is running."""
        return locks.is_held(self._lock)

    def start(self) -> bool:
        """Start the process, unless it is running. Return True if it was started."""
        with locks.held(self._lock) as lock:  # which the process inherits: no moment is left for another one
            if lock is None or (environment := self._prepare()) is None:
                return False
            spawn(self.role, self.folder, self.log, lock=lock, environment=environment)
        return True

    def poll(self) -> None:
        """Replace a process that was killed."""
        if time.monotonic() >= self._again_s and self.start():
            self._num_starts += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_starts, _PAUSE_S, _LONGEST_PAUSE_S)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it is gone."""
        processes.kill(processes.of_role(self.role, self.folder))

    def wait_until_ready(self, attempt: Path, meanwhile: Callable[[], None]) -> str:
        """Wait until the process is ready for an attempt, and return why it failed; empty if it did not."""
        num_starts = 0
        while (error := self._result()) is None:
            if (attempt / STOPPED).exists():
                return f"the attempt was ended before {self.before_ready}"
            num_starts += self.start()
            if num_starts > _MAX_STARTS:
                return f"the {self.role} died {_MAX_STARTS} times before {self.before_ready}"
            meanwhile()
            time.sleep(_POLL_S)
        return error

    def close(self) -> None:
        """Release what this process needs of the server, at the end of an attempt."""

    def _prepare(self) -> Mapping[str, str] | None:
        """Prepare the start, under the lock, and return the environment of the process. None: no start."""
        return os.environ

    def _result(self) -> str | None:
        """Return why the process failed, or an empty text if it is ready. None: it still starts."""
        return ""


def spawn(
    role: str, folder: Path, log: Path, *, lock: int, environment: Mapping[str, str] = os.environ
) -> int:
    """Start a process of Holdfast without a terminal, with a lock from the start, and return its pid."""
    kept = {name: value for name, value in environment.items() if name not in (TAG, NOTIFY, NOTIFY_ON, _PATH)}
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
    return Server("controller", folder.path, folder.controller_log, lock=folder.lock).start()


def rouse_controller(folder: JobFolder) -> None:
    """Start a controller, or wake the one that is running."""
    if not start_controller(folder):
        wake(folder.wakeup)
