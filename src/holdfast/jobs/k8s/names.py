"""Names and labels that Kubernetes accepts; pure."""

from __future__ import annotations

import re

from holdfast.jobs.k8s.refusal import invalid
from holdfast.jobs.task.model import Task

MAX_NAME = 40
"""Longest name of a job: pods and services append to it, and have at most 63 characters."""
_LABEL_KEY = re.compile(
    r"(?:(?=.{1,253}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/)?(?=.{1,63}$)\w(?:[\w.-]*\w)?", re.A
)
_LABEL_VALUE = re.compile(r"(?=.{0,63}$)(?:\w(?:[\w.-]*\w)?)?", re.A)
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


def object_name(task: Task) -> str:
    """Return the name of a task's job: a DNS label that begins with a letter.

    Raises:
        InvalidInput: the task's name is too long, or has neither letters nor digits.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
    found = plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-")
    # A shortened name could be that of another job, whose checkpoints this one would then continue.
    if not plain or len(found) > MAX_NAME:
        what = (
            f"expected a name of at most {MAX_NAME} letters, digits and dashes, found {task.name[:100]!r}. "
            "Give another one with --name."
        )
        raise invalid(task, "name", what)
    return found


def labels(task: Task) -> dict[str, str]:
    """Return the labels of a task's objects: Holdfast's, and those in `resources.labels`.

    Raises:
        InvalidInput: Kubernetes would reject a label.
    """
    ours = {"app.kubernetes.io/name": object_name(task), "app.kubernetes.io/managed-by": "holdfast"}
    asked = (task.document.get("resources") or {}).get("labels") or {}
    for key, plain in asked.items():
        value = "" if plain is None else str(plain)
        if not _LABEL_KEY.fullmatch(str(key)) or not _LABEL_VALUE.fullmatch(value):
            what = f"expected a label that Kubernetes accepts, found {str(key)[:100]!r}: {value[:100]!r}."
            raise invalid(task, "resources.labels", what)
        ours.setdefault(str(key), value)
    return ours


def is_subdomain(name: str) -> bool:
    """Return True if an object of Kubernetes may have this name."""
    return _SUBDOMAIN.fullmatch(name) is not None
