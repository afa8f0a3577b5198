"""Container image of a task, from `image_id: docker:IMAGE`; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from holdfast.errors import InvalidInput
from holdfast.jobs.task.model import Task, value_at

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
