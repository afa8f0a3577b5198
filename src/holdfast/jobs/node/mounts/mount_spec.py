"""Specifications of mounts: copies of buckets, mounted buckets, write-back directories."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from holdfast.jobs.folder import JobFolder
from holdfast.system.documents import decode, read_as
from holdfast.system.linux.files import write_atomic


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
    write_atomic(_document(folder), json.dumps([asdict(spec) for spec in specs]))


def read_mount_specs(folder: JobFolder) -> list[MountSpec]:
    """Return the specifications of a job's mounts."""
    try:
        document = decode(_document(folder).read_bytes(), "the mounts of a job", any_text=True)
    except FileNotFoundError:
        return []
    return list(read_as(tuple[MountSpec, ...], document, "the mounts of a job"))


def caches(folder: JobFolder) -> list[MountSpec]:
    """Return the write-back directories among a job's mounts."""
    return caches_of(read_mount_specs(folder))


def caches_of(specs: list[MountSpec]) -> list[MountSpec]:
    """Return the write-back directories among mounts."""
    return [spec for spec in specs if spec.kind is MountKind.CACHE]


def _document(folder: JobFolder) -> Path:
    return folder.path / "supplies.json"
