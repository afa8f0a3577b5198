"""Lease of a node on its container: starts the warden, waits for it, replaces a dead one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import ContainerFolder, JobFolder
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.container_state import read_container_state
from holdfast.jobs.node.mounts.lease import STOPPED
from holdfast.jobs.node.spawn import spawn
from holdfast.jobs.node_spec import read_environment
from holdfast.system import backoff
from holdfast.system.linux import locks
from holdfast.system.linux.joined_namespaces import JoinedNamespaces, open_namespaces

_POLL_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_STARTS = 3
"""Limit of starts of a warden that dies before the container runs."""


class ContainerLease:
    """Lease of one attempt on the container of its node.

    Args:
        attempt: folder of the attempt.
        folder: files of the container.
        log: log of the node, for a warden that this process starts.
    """

    def __init__(self, attempt: Path, folder: ContainerFolder, log: Path) -> None:
        self._attempt, self._folder, self._log = attempt, folder, log
        self._job = JobFolder(attempt.parents[1])
        self._again_s, self._num_starts = 0.0, 0
        self._namespaces: JoinedNamespaces | None = None
        self.environment: dict[str, str] = {}
        """Variables that the image defines, once the container runs."""

    def wait_until_there(self, meanwhile: Callable[[], None]) -> str | None:
        """Wait until the container runs.

        Args:
            meanwhile: called repeatedly.

        Returns:
            Why it cannot run, or None.

        Blocks: as long as that takes, while a warden is running.
        """
        num_starts = 0
        while not self._open():
            state = read_container_state(self._folder)
            if state is not None and state.error:
                return state.error
            if (self._attempt / STOPPED).exists():
                return "the attempt was ended before its container was running"
            if self._start():
                num_starts += 1
            if num_starts > _MAX_STARTS:
                return f"the warden of the container died {_MAX_STARTS} times"
            meanwhile()
            time.sleep(_POLL_S)
        return None

    def poll(self) -> None:
        """Replace a warden that was killed."""
        if time.monotonic() >= self._again_s and self._start():
            self._num_starts += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_starts, _PAUSE_S, _LONGEST_PAUSE_S)

    def join(self) -> None:
        """Move this process, of one thread, into the container.

        Raises:
            OSError: the kernel refuses that.
        """
        assert self._namespaces is not None, "the caller has waited for the container"
        self._namespaces.join()

    def _open(self) -> bool:
        """Open the namespaces of the container. Return False if it does not run."""
        state = read_container_state(self._folder)
        if state is None or state.error or not locks.is_held(self._folder.lock):
            return False
        try:
            namespaces = open_namespaces(state.pid)
        except OSError:
            return False
        process = processes.find(state.pid)
        if process is None or process.start != state.start:
            namespaces.close()
            return False
        if self._namespaces is not None:
            self._namespaces.close()
        self._namespaces, self.environment = namespaces, dict(state.environment)
        return True

    def _start(self) -> bool:
        return start_warden(self._job, self._folder, self._log)


def start_warden(job: JobFolder, folder: ContainerFolder, log: Path) -> bool:
    """Start the warden of a container, unless one is running. Return True if it was started."""
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = locks.acquire(folder.lock)
    if lock is None:
        return False
    try:
        folder.state.unlink(missing_ok=True)  # of a warden that is dead, perhaps of another boot
        spawn("warden", folder.path, log=log, lock=lock, environment=_environment(job))
    finally:
        os.close(lock)
    return True


def containers(job: JobFolder) -> list[tuple[int, ContainerFolder]]:
    """Return the containers for all attempts that may exist, by rank."""
    if not job.image.exists():
        return []
    ranks = sorted(int(path.parent.name) for path in job.path.glob("nodes/*/container"))
    return [(rank, job.container(rank)) for rank in ranks if not job.container(rank).removed.exists()]


def release_containers(job: JobFolder) -> None:
    """Have the containers of a job that has ended removed, by their wardens."""
    for rank, folder in containers(job):
        folder.unneeded.touch()
        start_warden(job, folder, job.log(rank))


def _environment(job: JobFolder) -> dict[str, str]:
    """Return the environment of the user who launched the job, for the runtime's own settings."""
    environment = dict(os.environ)
    with suppress(FileNotFoundError):  # the job has ended
        environment = dict(read_environment(job).base)
    return {name: value for name, value in environment.items() if name != TAG}
