"""Volumes of a pod: existing persistent volume claims, shared memory and the workdir; pure."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.jobs.k8s.names import is_subdomain
from holdfast.jobs.k8s.refusal import invalid
from holdfast.jobs.task.model import Task

WORKDIR = "/workdir"
"""Path of the clone of the task's repository."""
_SHARED_MEMORY = "/dev/shm"
_RESERVED = ("/", WORKDIR, _SHARED_MEMORY, "/proc", "/sys", "/dev", "/tmp")


@dataclass(frozen=True, slots=True)
class Volume:
    """Volume of a pod."""

    name: str
    path: str
    source: Mapping[str, Any]

    def as_volume(self) -> dict[str, Any]:
        """Return the entry of the pod's `volumes`."""
        return {"name": self.name, **self.source}

    def as_mount(self) -> dict[str, Any]:
        """Return the entry of a container's `volumeMounts`."""
        return {"name": self.name, "mountPath": self.path}


def volumes(task: Task) -> list[Volume]:
    """Return the volumes of a task's pods.

    Raises:
        InvalidInput: an entry of `volumes` is not a path and the name of a claim.
    """
    # The default of 64 MiB is too small for the workers of a DataLoader.
    found = [Volume("shared-memory", _SHARED_MEMORY, {"emptyDir": {"medium": "Memory"}})]
    if task.repository is not None:
        found.append(Volume("workdir", WORKDIR, {"emptyDir": {}}))
    for number, (path, value) in enumerate((task.document.get("volumes") or {}).items()):
        claim = _claim(task, str(path), value)
        source = {"persistentVolumeClaim": {"claimName": claim}}
        found.append(Volume(f"volume-{number}", str(path), source))
    return found


def _claim(task: Task, path: str, value: Any) -> str:
    """Return the name of the claim of an entry."""
    key = f"volumes.{path}"
    is_plain = path.startswith("/") and posixpath.normpath(path) == path and not set(path) & set(":\0\n")
    if not is_plain or path in _RESERVED:
        what = f"expected an absolute path without `..`, that is not used otherwise, found {path[:100]!r}."
        raise invalid(task, key, what)
    name = value.get("name") if isinstance(value, Mapping) and set(value) == {"name"} else value
    if not isinstance(name, str) or not is_subdomain(name):
        what = (
            f"expected the name of a persistent volume claim that exists, found {str(value)[:100]!r}. No "
            "volume is created."
        )
        raise invalid(task, key, what)
    return name
