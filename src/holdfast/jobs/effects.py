"""Which keys of a task file mean less on an engine than they say, found by that engine's own table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.jobs.engine import Effect
from holdfast.jobs.task.contents import Task


def find_effects(task: Task, table: Mapping[str, str]) -> list[Effect]:
    """The keys of a table that a task has a value for.

    Args:
        task: the task.
        table: by the path of a key, as resources.use_spot, what becomes of it.
    """
    return [
        Effect(key, task.lines[key], what)
        for key, what in table.items()
        if key in task.lines and value_at(task.document, key) is not None
    ]


def value_at(document: Mapping[str, Any], key: str) -> Any:
    """The value at a path of keys; None if there is none."""
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
