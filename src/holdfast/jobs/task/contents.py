"""A task: what a task file asks for, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.jobs.task.accelerators import Accelerators


class MountMode(str, Enum):
    """How a place outside a job is made visible in it."""

    COPY = "COPY"
    MOUNT = "MOUNT"
    MOUNT_CACHED = "MOUNT_CACHED"


@dataclass(frozen=True, slots=True)
class FileMount:
    """An entry of `file_mounts`."""

    target: str  # path in the job: absolute, below ~, or below the workdir
    source: str | None  # path or URL; None: the bucket called `bucket`
    mode: MountMode
    bucket: str | None = None  # name of a bucket
    line: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)  # the whole entry, for engines that know more

    @property
    def is_remote(self) -> bool:
        """True if its source is a URL."""
        return self.source is not None and "://" in self.source and not self.source.startswith("file://")


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository that is the workdir."""

    url: str
    ref: str | None = None  # branch, tag or commit; None: the branch that the repository shows first


@dataclass(frozen=True, slots=True)
class Recovery:
    """`resources.job_recovery`."""

    max_restarts: int = 0
    free_codes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Task:
    """What one task file asks for."""

    name: str
    run: str
    setup: str = ""
    workdir: str | None = None  # folder of this machine, absolute
    repository: Repository | None = None  # instead of a folder
    num_nodes: int = 1
    accelerators: Accelerators = field(default_factory=lambda: Accelerators(()))
    recovery: Recovery = field(default_factory=Recovery)
    file_mounts: tuple[FileMount, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    document: Mapping[str, Any] = field(default_factory=dict)  # normalised, without values of secrets
    lines: Mapping[str, int] = field(default_factory=dict)  # line of each key of the file, by path
    notes: tuple[str, ...] = ()  # how something was read that may surprise
    path: str = ""  # of the file
