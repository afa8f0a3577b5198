"""Mounts and links of a job, as its folder records them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from holdfast.jobs.folder import JobFolder
from holdfast.system.documents import decode, read_as
from holdfast.system.linux.files import write_atomic

_T = TypeVar("_T")
_MOUNTS, _LINKS = "supplies.json", "mounts.json"


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
    _write(folder.path / _MOUNTS, specs)


def read_mount_specs(folder: JobFolder) -> list[MountSpec]:
    """Return the specifications of a job's mounts."""
    return _read(folder.path / _MOUNTS, MountSpec)


def caches(folder: JobFolder) -> list[MountSpec]:
    """Return the write-back directories among a job's mounts."""
    return caches_of(read_mount_specs(folder))


def caches_of(specs: list[MountSpec]) -> list[MountSpec]:
    """Return the write-back directories among mounts."""
    return [spec for spec in specs if spec.kind is MountKind.CACHE]


@dataclass(frozen=True, slots=True)
class Link:
    """Symbolic link at a path of the job."""

    target: str  # absolute, unless `is_inside`
    source: str  # absolute
    key: str  # key in the task file, for messages
    is_private: bool = False  # seen by the job's processes only; see `private_links`
    is_inside: bool = False  # in the job's containers; a target may begin with ~ until they exist


def write_links(folder: JobFolder, links: list[Link]) -> None:
    """Write the links of a job."""
    _write(folder.path / _LINKS, links)


def read_links(folder: JobFolder) -> list[Link]:
    """Return the links of a job, private ones included."""
    return _read(folder.path / _LINKS, Link)


def outside_path(path: str, links: Sequence[Link]) -> str:
    """Return a path of a job as it is outside of the job: that below a link's source, not its target."""
    for link in links:
        if Path(path).is_relative_to(link.target):
            return str(Path(link.source, Path(path).relative_to(link.target)))
    return path


def _write(path: Path, values: list[MountSpec] | list[Link]) -> None:
    write_atomic(path, json.dumps([asdict(value) for value in values]))


def _read(path: Path, kind: type[_T]) -> list[_T]:
    """Return the values of a document, which may be absent."""
    try:
        document = decode(path.read_bytes(), str(path), any_text=True)
    except FileNotFoundError:
        return []
    return [read_as(kind, value, str(path)) for value in read_as(list[Any], document, str(path))]
