"""Task-file keys that an engine ignores or interprets differently, from the engine's own table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.jobs.engine import UnsupportedKey
from holdfast.jobs.task.model import Task


def find_unsupported_keys(task: Task, table: Mapping[str, str]) -> list[UnsupportedKey]:
    """Return the keys of a table that a task sets.

    Args:
        task: the task.
        table: what the engine does with a key, by its path, such as resources.use_spot.
    """
    return [
        UnsupportedKey(key, task.lines[key], what)
        for key, what in table.items()
        if key in task.lines and value_at(task.document, key) is not None
    ]


def value_at(document: Mapping[str, Any], key: str) -> Any:
    """Return the value at a path of keys, or None."""
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
