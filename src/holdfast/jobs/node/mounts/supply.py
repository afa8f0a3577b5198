"""What has to be there before a job begins: copies of buckets, mounted buckets, write-back directories."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from holdfast.documents import decode, read_as
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.plan import write_whole


class Kind(str, Enum):
    """How a place is brought to this machine."""

    COPY = "copy"  # all its objects, once
    BUCKET = "bucket"  # as a file system, by rclone
    CACHE = "cache"  # as a write-back directory


@dataclass(frozen=True, slots=True)
class Supply:
    """A place that is to be brought to a path of this machine, for all nodes of a job."""

    kind: Kind
    place: str  # path or URL
    path: str  # absolute, in the job's folder
    key: str  # as it stands in the task file, for messages
    is_read_only: bool = False


def write_supplies(folder: JobFolder, supplies: list[Supply]) -> None:
    """Write down what the attempts of a job need."""
    write_whole(_document(folder), json.dumps([asdict(supply) for supply in supplies]))


def read_supplies(folder: JobFolder) -> list[Supply]:
    """What the attempts of a job need; nothing if nobody has written it down."""
    try:
        told = decode(_document(folder).read_bytes(), "what a job needs", any_text=True)
    except FileNotFoundError:
        return []
    return list(read_as(tuple[Supply, ...], told, "what a job needs"))


def caches(folder: JobFolder) -> list[Supply]:
    """The write-back directories among them."""
    return [supply for supply in read_supplies(folder) if supply.kind is Kind.CACHE]


def _document(folder: JobFolder) -> Path:
    return folder.path / "supplies.json"
