"""Container of a node as its job sees it: the runtime, the specification, and the server that holds it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

from msgspec import Struct
from typing_extensions import override

from holdfast.errors import Unsupported
from holdfast.jobs.folder import ContainerFolder, JobFolder
from holdfast.jobs.journal import read_document
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.mount_records import read_links, read_mount_specs
from holdfast.jobs.node.roles import Server
from holdfast.jobs.node_spec import read_environment
from holdfast.jobs.task.model import MountMode
from holdfast.system.linux.mount_namespace import JoinedNamespaces, open_namespaces
from holdfast.system.linux.program_runs import run_program

_LIMIT_S = 30.0


class ContainerRuntime(str, Enum):
    """Program that makes containers. Both have the same commands."""

    PODMAN = "podman"
    DOCKER = "docker"


def find_runtime() -> ContainerRuntime | None:
    """Return the runtime that answers on this machine, or None. Podman is preferred: it needs no root."""
    if _answer(shutil.which("podman"), "{{.Host.ServiceIsRemote}}") == "false":
        return ContainerRuntime.PODMAN
    options = _answer(shutil.which("docker"), "{{json .SecurityOptions}}")
    if options is None:
        return None
    if os.geteuid() != 0 and "name=rootless" not in options:
        raise Unsupported(
            "docker runs containers as root here, so that the processes of the job could be neither notified "
            "nor ended by you, and its files would belong to root. Install podman (`apt-get install podman "
            "uidmap`) or docker's rootless mode, or remove image_id: then the commands run on this machine "
            "as it is. Nothing was started."
        )
    return ContainerRuntime.DOCKER


@functools.cache
def _answer(program: str | None, question: str) -> str | None:
    """Return the answer of a runtime about itself, or None if it does not answer."""
    try:
        done = run_program((program, "info", "--format", question), timeout_s=_LIMIT_S) if program else None
    except OSError:
        return None
    return done.text if done and done.status == 0 else None


class ContainerOwner(Struct, frozen=True):
    """Owner of a container that belongs to one attempt: a process on the same machine."""

    machine: str
    attempt: int
    pid: int
    start: int  # clock ticks since boot, to distinguish it from another process with this pid


class ImageSpec(Struct, frozen=True):
    """Image of a job, and the settings of its containers: a document in the job's folder."""

    runtime: ContainerRuntime
    image: str
    task_id: str
    binds: tuple[str, ...] = ()  # paths of this machine that the containers have at the same place
    has_gpus: bool = False
    has_file_systems: bool = False  # some are mounted below these paths while the containers run
    scratch: str = ""  # path of the job's scratch folder; empty: the mounts are in the job's folder
    owner: ContainerOwner | None = None  # None: the containers are kept until the job has ended


def make_image_spec(
    job: JobFolder,
    runtime: ContainerRuntime,
    image: str,
    task_id: str,
    *,
    has_gpus: bool,
    scratch: JobFolder | None = None,
    owner: ContainerOwner | None = None,
) -> ImageSpec:
    """Return the specification of a job, whose links and mounts are recorded already."""
    mounts = scratch or job
    own = [str(one.path) for one in (job, mounts)]
    sources = [link.source for link in read_links(mounts)]
    others = [one for one in sources if not any(Path(one).is_relative_to(folder) for folder in own)]
    return ImageSpec(
        runtime,
        image,
        task_id,
        tuple(sorted({*own, *others})),
        has_gpus=has_gpus,
        has_file_systems=any(one.mode is MountMode.MOUNT for one in read_mount_specs(mounts)),
        scratch="" if scratch is None else str(scratch.path),
        owner=owner,
    )


class ContainerState(Struct, frozen=True):
    """Process that holds the namespaces of a container, or the reason why it cannot run, from its warden."""

    pid: int = 0
    start: int = 0  # clock ticks since boot, to distinguish it from another process with this pid
    environment: Mapping[str, str] = {}  # of the image
    error: str = ""


class Container(Server):
    """Container of a node, which a warden creates, keeps running, and removes at the end."""

    before_ready = "its container was running"

    def __init__(self, job: JobFolder, folder: ContainerFolder, log: Path) -> None:
        super().__init__("warden", folder.path, log)
        self.files, self._job = folder, job
        self._namespaces: JoinedNamespaces | None = None
        self.environment: dict[str, str] = {}  # variables that the image defines, once the container runs

    def join(self) -> None:
        """Move this process, of one thread, into the container."""
        assert self._namespaces is not None, "the caller has waited for the container"
        self._namespaces.join()

    @override
    def close(self) -> None:
        if self._namespaces is not None:
            self._namespaces.close()

    def release(self) -> None:
        """Have the container removed by its warden: no command runs in it any more."""
        self.files.unneeded.touch()
        self.start()

    @override
    def start(self) -> bool:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return super().start()

    @override
    def _result(self) -> str | None:
        """Open the namespaces of the container, once it runs."""
        state = read_document(self.files.state, ContainerState)
        if state is None or state.error:
            return state.error if state else None
        if not self.is_alive:
            return None
        try:
            namespaces = open_namespaces(state.pid)
        except OSError:
            return None
        if not processes.is_running(state.pid, state.start):
            namespaces.close()
            return None
        self.close()
        self._namespaces, self.environment = namespaces, dict(state.environment)
        return ""

    @override
    def _prepare(self) -> Mapping[str, str]:
        self.files.state.unlink(missing_ok=True)  # of a warden that is dead, perhaps of another boot
        base: Mapping[str, str] = {}
        with suppress(FileNotFoundError):  # the job has ended
            base = read_environment(self._job).base  # of its user, for the runtime's own settings
        return base or os.environ


def containers(job: JobFolder) -> dict[int, Container]:
    """Return the containers for all attempts that may exist, by rank."""
    if not job.image.exists():
        return {}
    ranks = sorted(int(path.parent.name) for path in job.path.glob("nodes/*/container"))
    found = {rank: Container(job, job.container(rank), job.log(rank)) for rank in ranks}
    return {rank: container for rank, container in found.items() if not container.files.removed.exists()}


def release_containers(job: JobFolder) -> None:
    """Have the containers of a job that has ended removed, by their wardens."""
    for container in containers(job).values():
        container.release()
