"""Mounts of a job, as its folder records them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import read_list, write_list

_MOUNTS = "supplies.json"


class MountKind(str, Enum):
    """Kind of a mount."""

    COPY = "copy"  # all objects, copied once
    BUCKET = "bucket"  # a file system served by rclone
    CACHE = "cache"  # a write-back directory


@dataclass(frozen=True, slots=True)
class MountSpec:
    """Specification of a mount, shared by all nodes of a job."""

    kind: MountKind
    place: str  # path or URL
    path: str  # absolute, in the job's folder
    key: str  # key in the task file, for messages
    is_read_only: bool = False
    fetch_bytes: int | None = None  # limit for the download into a write-back directory
    is_shared: bool = False  # other machines mount the same place in the same attempt


def write_mount_specs(folder: JobFolder, specs: list[MountSpec]) -> None:
    """Write the specifications of a job's mounts."""
    write_list(folder.path / _MOUNTS, specs)


def read_mount_specs(folder: JobFolder) -> list[MountSpec]:
    """Return the specifications of a job's mounts."""
    return read_list(folder.path / _MOUNTS, MountSpec)


def caches(folder: JobFolder) -> list[MountSpec]:
    """Return the write-back directories among a job's mounts."""
    return [spec for spec in read_mount_specs(folder) if spec.kind is MountKind.CACHE]
