"""Record of the links of a job, from its mount points to their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.jobs.folder import JobFolder
from holdfast.system.documents import decode, read_as
from holdfast.system.linux.files import write_atomic


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
    write_atomic(_document(folder), json.dumps([asdict(link) for link in links]))


def read_links(folder: JobFolder) -> list[Link]:
    """Return the links of a job, private ones included."""
    try:
        document = decode(_document(folder).read_bytes(), "the links of a job", any_text=True)
    except FileNotFoundError:
        return []
    return list(read_as(tuple[Link, ...], document, "the links of a job"))


def outside_path(path: str, links: Sequence[Link]) -> str:
    """Return a path of a job as it is outside of the job: that below a link's source, not its target."""
    for link in links:
        if Path(path).is_relative_to(link.target):
            return str(Path(link.source, Path(path).relative_to(link.target)))
    return path


def _document(folder: JobFolder) -> Path:
    return folder.path / "mounts.json"
