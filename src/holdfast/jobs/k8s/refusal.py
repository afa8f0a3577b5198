"""Errors about a key of a task file, with its line; pure."""

from __future__ import annotations

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.task.model import Task

POD_CONFIG = "config.kubernetes.pod_config"
"""Key of a task file for the user's own settings of pods, in SkyPilot's form."""


def invalid(task: Task, key: str, what: str) -> InvalidInput:
    """Return the error for an invalid value.

    Args:
        key: path of the key in the file, such as resources.cpus.
        what: expected and found.
    """
    return InvalidInput(f"{_place(task, key)}: {what} Nothing was started.")


def unsupported(task: Task, key: str, what: str) -> Unsupported:
    """Return the error for a key that Kubernetes cannot provide; see `invalid`."""
    return Unsupported(f"{_place(task, key)}: {what} Nothing was started.")


def line_of(task: Task, key: str) -> int:
    """Return the line of a key, or of the nearest key around it."""
    parts = key.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((task.lines[one] for one in around if one in task.lines), 1)


def _place(task: Task, key: str) -> str:
    return f"{task.path}:{line_of(task, key)}: {key}"
