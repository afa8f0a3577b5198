"""Lease of an attempt on the container of its node, which a warden holds."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import ContainerFolder, JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.image_spec import ContainerState
from holdfast.jobs.node.roles import Lease, ProcessRole
from holdfast.jobs.node_spec import read_environment
from holdfast.system.linux.mount_namespace import JoinedNamespaces, open_namespaces


class ContainerLease(Lease):
    """Lease of one attempt on the container of its node.

    Args:
        attempt: folder of the attempt.
        folder: files of the container.
        log: log of the node, for a warden that this process starts.
    """

    def __init__(self, attempt: Path, folder: ContainerFolder, log: Path) -> None:
        super().__init__(attempt, warden_of(folder), "its container was running")
        self._folder, self._log = folder, log
        self._job = JobFolder(attempt.parents[1])
        self._namespaces: JoinedNamespaces | None = None
        self.environment: dict[str, str] = {}  # variables that the image defines, once the container runs

    def join(self) -> None:
        """Move this process, of one thread, into the container."""
        assert self._namespaces is not None, "the caller has waited for the container"
        self._namespaces.join()

    @override
    def _result(self) -> str | None:
        """Open the namespaces of the container, once it runs."""
        state = read_document(self._folder.state, ContainerState)
        if state is None or state.error:
            return state.error if state else None
        if not self._role.is_alive:
            return None
        try:
            namespaces = open_namespaces(state.pid)
        except OSError:
            return None
        process = processes.find(state.pid)
        if process is None or process.start != state.start:
            namespaces.close()
            return None
        if self._namespaces is not None:
            self._namespaces.close()
        self._namespaces, self.environment = namespaces, dict(state.environment)
        return ""

    @override
    def _start(self) -> bool:
        return start_warden(self._job, self._folder, self._log)


def warden_of(folder: ContainerFolder) -> ProcessRole:
    """Return the role of a container's warden."""
    return ProcessRole("warden", folder.path, folder.lock)


def start_warden(job: JobFolder, folder: ContainerFolder, log: Path) -> bool:
    """Start the warden of a container, unless one is running. Return True if it was started."""
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget_dead() -> None:
        folder.state.unlink(missing_ok=True)  # of a warden that is dead, perhaps of another boot

    return warden_of(folder).start(log, environment=_environment(job), before=forget_dead)


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
