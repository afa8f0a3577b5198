"""Contents of a task file, as values: amounts in all their forms, mounts, tasks, images, and ~/sky_workdir.

~/sky_workdir is SkyPilot's workdir on every machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.task.subscription import Subscription

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B?)?\+?", re.I)
_MULTIPLE = re.compile(r"\d+(?:\.\d+)?x", re.I)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def parse_cpus(value: Any) -> float | None:
    """Return the number of a `resources.cpus` value, or None if it is invalid."""
    try:
        found = float(str(value).removesuffix("+"))
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None


def memory_mib(value: Any) -> int | None:
    """Return the MiB of a `resources.memory` value, where a plain number means GiB. None if invalid."""
    found = _SIZE.fullmatch(str(value).strip())
    return None if found is None else int(float(found[1]) * _MIB[(found[2] or "G").upper()])


def is_multiple(value: Any) -> bool:
    """Return True if a `resources.memory` value is a multiple of the CPUs, such as 4x."""
    return _MULTIPLE.fullmatch(str(value).strip()) is not None


_ONE = re.compile(r"[A-Za-z0-9][\w.\-/+]*(?::\d+(?:\.\d+)?)?")


class Accelerators(Struct, frozen=True):
    """Requested accelerators."""

    choices: tuple[tuple[str, float], ...]  # alternatives, each with name and number per node
    is_ordered: bool = False  # the first available one is preferred
    is_folded: bool = False  # the file has lines that YAML joins into one text

    @property
    def num_per_node(self) -> int:
        """The greatest number of any choice, as a whole number. 0 without choices."""
        return max((int(count) for _, count in self.choices), default=0)

    def plain(self) -> Any:
        """Return the accelerators in a form that SkyPilot parses correctly."""
        if self.is_ordered:
            return [f"{name}:{_number(count)}" for name, count in self.choices]
        if len(self.choices) == 1:
            name, count = self.choices[0]
            return f"{name}:{_number(count)}"
        return {name: _number(count) for name, count in self.choices}


def parse_accelerators(plain: Any) -> Accelerators | str:
    """Parse accelerators in any form. Return an error message if they are invalid.

    Forms: `A100`, `A100:8`, `{A100: 8}`, `{A100:1, V100:1}` (a set: any of them), `[A100:1, V100:1]` (in
    order), and lines without a space after the colon, which YAML folds into one text (treated as that set).
    """
    if plain is None:
        return Accelerators(())
    if isinstance(plain, str):
        words = plain.split()
        return _read_all(words, is_ordered=False, is_folded=len(words) > 1)
    if isinstance(plain, Mapping):
        words = [str(name) if count is None else f"{name}:{count}" for name, count in plain.items()]
        return _read_all(words, is_ordered=False)
    return _read_all([str(word) for word in plain], is_ordered=True)


def _read_all(words: list[str], *, is_ordered: bool, is_folded: bool = False) -> Accelerators | str:
    bad = [word for word in words if not _ONE.fullmatch(word)]
    if bad or not words:
        found = repr(bad[0]) if bad else "nothing"
        return f"expected NAME or NAME:COUNT, as A100:8, found {found}"
    pairs = (word.partition(":") for word in words)
    choices = tuple((name, float(count or 1)) for name, _, count in pairs)
    return Accelerators(choices, is_ordered=is_ordered, is_folded=is_folded)


def _number(count: float) -> int | float:
    return int(count) if count == int(count) else count


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


SKY_WORKDIR = "sky_workdir"  # name of the folder in the user's home
_PATH = re.compile(r"(?<![\w/.~-])(?:~|\$HOME|\$\{HOME\})/sky_workdir(?![\w.-]|/+\.\.)")
_TARGET = re.compile(r"~/+sky_workdir(?:/+(.*))?")
_PLAIN = re.compile(r"[\w/.@%+=-]+")
_MAX_WORD = 1000
_BLANK = re.compile(r"[\s\"'();|&<>]")


def replace_sky_workdir(text: str, workdir: str) -> str:
    """Return commands or a value with a plain path in the place of ~/sky_workdir and $HOME/sky_workdir."""

    def replaced(found: re.Match[str]) -> str:  # except after `HOST:`, as that path is of another machine
        before = text[max(0, found.start() - _MAX_WORD) : found.start()]
        word = _BLANK.split(before)[-1]
        return found[0] if word.endswith(":") and "=" not in word else workdir

    return _PATH.sub(replaced, text)


def is_plain(path: str) -> bool:
    """Return True if a shell reads a path as it is, with and without quotes."""
    return _PLAIN.fullmatch(path) is not None


def path_in_workdir(target: str) -> str | None:
    """Return the path of a mount's target relative to the workdir, "" for the workdir itself, or None."""
    found = _TARGET.fullmatch(target)
    if found is None or ".." in (found[1] or "").split("/"):
        return None
    return (found[1] or "").rstrip("/")
