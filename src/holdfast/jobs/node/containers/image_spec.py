"""Specification of a job's containers, a document in the job's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.documents import decode_dataclass
from holdfast.jobs.node.containers.runtime import ContainerRuntime
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.mounts.job_links import read_links
from holdfast.jobs.node.mounts.mount_spec import MountKind, read_mount_specs
from holdfast.linux.files import write_atomic


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Image of a job, and the settings of its containers."""

    runtime: ContainerRuntime
    image: str
    task_id: str
    binds: tuple[str, ...] = ()  # paths of this machine that the containers have at the same place
    has_gpus: bool = False
    has_file_systems: bool = False  # some are mounted below these paths while the containers run


def write_image_spec(
    folder: JobFolder, runtime: ContainerRuntime, image: str, task_id: str, *, has_gpus: bool
) -> None:
    """Write the specification of a job, whose links and mounts are recorded already."""
    own = [link.source for link in read_links(folder) if not Path(link.source).is_relative_to(folder.path)]
    spec = ImageSpec(
        runtime,
        image,
        task_id,
        tuple(sorted({str(folder.path), *own})),
        has_gpus=has_gpus,
        has_file_systems=any(one.kind is MountKind.BUCKET for one in read_mount_specs(folder)),
    )
    write_atomic(folder.image, json.dumps(asdict(spec)))


def read_image_spec(folder: JobFolder) -> ImageSpec | None:
    """Return the specification of a job, or None for a job without image.

    Raises:
        Corrupt: the document is damaged.
    """
    try:
        data = folder.image.read_bytes()
    except FileNotFoundError:
        return None
    return decode_dataclass(ImageSpec, data, str(folder.image), any_text=True)
