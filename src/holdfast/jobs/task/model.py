"""Contents of a task file, as values, and the container image that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.task.amounts import Accelerators
from holdfast.jobs.task.subscription import Subscription


class MountMode(str, Enum):
    """Mode of a mount."""

    COPY = "COPY"
    MOUNT = "MOUNT"
    MOUNT_CACHED = "MOUNT_CACHED"


class FileMount(Struct, frozen=True):
    """Entry of `file_mounts`."""

    target: str  # path in the job: absolute, below ~, or below the workdir
    source: str | None  # path or URL. None: the bucket named `bucket`
    mode: MountMode
    bucket: str | None = None  # name of a bucket
    spec: Mapping[str, Any] = {}  # the whole entry, for engines that need more
    is_inside: bool = False  # its target is in the container image of the task

    @property
    def key(self) -> str:
        """Path of its key in the file."""
        return f"file_mounts.{self.target}"

    @property
    def is_remote(self) -> bool:
        """True if the source is a URL."""
        return self.source is not None and "://" in self.source and not self.source.startswith("file://")

    @property
    def is_in_place(self) -> bool:
        """True if the path of the target is that of the source."""
        if self.is_inside or self.source is None or self.is_remote or self.mode is MountMode.MOUNT_CACHED:
            return False
        target = Path(self.target).expanduser()
        source = Path(self.source.removeprefix("file://")).expanduser().absolute()
        return target.is_absolute() and os.path.normpath(target) == os.path.normpath(source)


class Repository(Struct, frozen=True):
    """Git repository used as the workdir."""

    url: str
    ref: str | None = None  # branch, tag or commit. None: the repository's default branch


class JobRecovery(Struct, frozen=True):
    """`resources.job_recovery` of a task file."""

    max_restarts: int = 0
    free_codes: frozenset[int] = frozenset()


class Task(Struct, frozen=True):
    """Contents of a task file, or of one document of a pipeline."""

    name: str
    run: str
    setup: str = ""
    workdir: str | None = None  # folder on this machine, absolute
    repository: Repository | None = None  # instead of a folder
    num_nodes: int = 1
    accelerators: Accelerators = field(default_factory=lambda: Accelerators(()))
    cpus: float = 0.0  # per node; 0: not asked for
    memory_mib: int = 0  # per node; 0: not asked for
    priority: int = 0  # jobs with a greater one come first
    recovery: JobRecovery = field(default_factory=JobRecovery)
    file_mounts: tuple[FileMount, ...] = ()
    envs: Mapping[str, str] = {}
    secrets: Mapping[str, str] = {}
    document: Mapping[str, Any] = {}  # normalized, without values of secrets
    lines: Mapping[str, int] = {}  # line of each key in the file, by path
    notes: tuple[str, ...] = ()  # interpretations that may surprise
    path: str = ""  # path of the file
    image: str | None = None  # container image in which the engine runs the commands
    subscription: Subscription = field(default_factory=Subscription)  # from the launch, never from a file

    def line_of(self, key: str) -> int:
        """Return the line of a key, or of the nearest key around it, or 1."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key, 1)

    def where(self, key: str) -> str:
        """Return the place of a key, for the beginning of a message."""
        return f"{self.path}:{self.line_of(key)}: {key}"


class TaskFile(Struct, frozen=True):
    """Contents of a task file: one task, or a pipeline of tasks that run one after the other."""

    name: str
    tasks: tuple[Task, ...]
    path: str = ""

    @property
    def is_pipeline(self) -> bool:
        """True if there are several tasks."""
        return len(self.tasks) > 1

    def only(self) -> Task:
        """Return the only task."""
        if self.is_pipeline:
            raise Unsupported(f"{self.path}: expected one task, found {len(self.tasks)} (a pipeline).")
        return self.tasks[0]


def value_at(document: Any, path: str) -> Any:
    """Return the value at a path of keys, or None."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


_PREFIX = "docker:"
_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.A)
_SERVER = "SKYPILOT_DOCKER_SERVER"  # variable of SkyPilot with the registry that an image without one is from
_REGISTRY = re.compile(r"(?:[^/]*[.:][^/]*|localhost)/")


def image_id(task: Task) -> Any:
    """Return the value of `image_id`, or the only one of a map from regions."""
    asked = value_at(task.document, "resources.image_id")
    return next(iter(asked.values())) if isinstance(asked, Mapping) and len(asked) == 1 else asked


def docker_image(task: Task) -> str | None:
    """Return the name of the container image of a task, or None."""
    asked = image_id(task)
    if not isinstance(asked, str) or not asked.startswith(_PREFIX):
        return None
    name = asked.removeprefix(_PREFIX)
    if _NAME.fullmatch(name) is None:
        what = f"expected docker:IMAGE, such as docker:ubuntu:24.04, found {asked[:200]!r}."
        raise InvalidInput(f"{task.where('resources.image_id')}: {what}")
    server = {**task.envs, **task.secrets}.get(_SERVER, "").strip("/")
    return f"{server}/{name}" if server and not _REGISTRY.match(name) else name


def qualified(image: str) -> str:
    """Return the name of an image with its registry, by default that of `docker pull`."""
    if _REGISTRY.match(image):
        return image
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def in_image(task: Task, image: str) -> Task:
    """Return a task whose commands run in an image, where its mounts are too."""
    mounts = tuple(replace(mount, is_inside=True) for mount in task.file_mounts)
    return replace(task, image=image, file_mounts=mounts)
