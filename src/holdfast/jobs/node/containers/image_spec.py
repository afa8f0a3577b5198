"""Specification and state of a job's containers: documents in the job's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_document, write_document
from holdfast.jobs.node.containers.runtime import ContainerRuntime
from holdfast.jobs.node.mounts.mount_spec import MountKind, read_links, read_mount_specs


@dataclass(frozen=True, slots=True)
class ContainerOwner:
    """Owner of a container that belongs to one attempt: a process on the same machine."""

    machine: str
    attempt: int
    pid: int
    start: int  # clock ticks since boot, to distinguish it from another process with this pid


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Image of a job, and the settings of its containers."""

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
        has_file_systems=any(one.kind is MountKind.BUCKET for one in read_mount_specs(mounts)),
        scratch="" if scratch is None else str(scratch.path),
        owner=owner,
    )


def write_image_spec(path: Path, spec: ImageSpec) -> None:
    """Write a specification."""
    write_document(path, spec)


def read_image_spec(path: Path) -> ImageSpec | None:
    """Return a specification, or None if the job has no image."""
    return read_document(path, ImageSpec)


@dataclass(frozen=True, slots=True)
class ContainerState:
    """Process that holds the namespaces of a container, or the reason why it cannot run.

    Its warden writes it, and the node's agent reads it.
    """

    pid: int = 0
    start: int = 0  # clock ticks since boot, to distinguish it from another process with this pid
    environment: Mapping[str, str] = field(default_factory=dict)  # of the image
    error: str = ""
