"""Warden of a node's container: creates it, keeps it running, and removes it when it is unneeded."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.environment import tag
from holdfast.jobs.folder import ContainerFolder, JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.image_spec import ContainerState, ImageSpec, read_image_spec
from holdfast.jobs.node.containers.node_container import NodeContainer, explain
from holdfast.jobs.node.containers.runtime import RuntimeCalls
from holdfast.jobs.node.roles import log_line
from holdfast.system.linux.processes import adopt_orphans

_CHECK_S = 0.25
_REMOVALS = 3  # limit of attempts to remove a container. The next command about the job tries again


def serve(folder: Path) -> None:
    """Run the warden. The caller holds its lock.

    Args:
        folder: folder of the container.

    Blocks: until the container is unneeded and its processes are gone.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Processes of the runtime outlive the call that starts them. They must not become children of the agent,
    # which ends all that are left of the job's commands.
    adopt_orphans()
    own = read_image_spec(ContainerFolder(folder).image)
    job = JobFolder(folder.parents[2 if own is None else 3])  # one attempt's container is in its folder
    spec = own or read_image_spec(job.image)
    if spec is not None:
        Warden(job, ContainerFolder(folder), spec).serve()


class Warden:
    """Warden, which holds the lock of the container's folder."""

    def __init__(self, job: JobFolder, folder: ContainerFolder, spec: ImageSpec) -> None:
        self._spec, self._folder = spec, folder
        rank, owner = int(folder.path.parent.name), spec.owner
        self._tag = tag(spec.task_id) if owner is None else tag(spec.task_id, owner.attempt, rank)
        needed, always = RuntimeCalls(lambda: not self._is_unneeded), RuntimeCalls(lambda: True)
        self._container = NodeContainer(job, rank, folder, spec, needed, log_line)
        self._doomed = NodeContainer(job, rank, folder, spec, always, log_line)

    def serve(self) -> None:
        """Keep the container running until it is unneeded, and remove it then."""
        state = ContainerState() if self._is_unneeded else self._start()
        while not self._is_unneeded:
            time.sleep(_CHECK_S)
            processes.reap()
            if not state.error and not self._is_unneeded and not _is_alive(state.pid, state.start):
                log_line("the container has ended, starting it again")
                state = self._start()
        # Keepers of the last attempt may be uploading, with programs of the image.
        while self._has_processes():
            time.sleep(_CHECK_S)
            processes.reap()
        self._remove()

    @property
    def _is_unneeded(self) -> bool:
        if self._folder.unneeded.exists() or not self._folder.path.exists():
            return True
        owner = self._spec.owner
        return owner is not None and not _is_alive(owner.pid, owner.start)

    def _has_processes(self) -> bool:
        return bool(processes.tagged(self._tag, processes.snapshot()))

    def _start(self) -> ContainerState:
        try:
            state = self._container.ensure_running()
        except HoldfastError as error:
            state = ContainerState(error=explain(error, self._spec))
        if not self._is_unneeded:
            write_document(self._folder.state, state)
        return state

    def _remove(self) -> None:
        for _ in range(_REMOVALS):
            try:
                self._doomed.remove()
            except RetryLater as error:
                log_line(f"cannot remove the container yet: {error}")
                time.sleep(_CHECK_S)
                continue
            except HoldfastError as error:
                log_line(f"cannot remove the container: {error}")
                return
            if self._folder.path.exists():
                self._folder.removed.touch()
            return


def _is_alive(pid: int, start: int) -> bool:
    found = processes.find(pid)
    return found is not None and found.start == start
