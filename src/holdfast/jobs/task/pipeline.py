"""The documents of a task file: one task, or a header and the tasks of a pipeline; pure.

Source: skypilot 0.14.1, sky/utils/dag_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.task.document import Value

_HEADERS = ({"name"}, {"name", "execution"})
"""Keys of a header. With others too, the first document is a task."""
MAX_TASKS = 100


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents of a task file, without its header."""

    name: str | None  # from the header
    tasks: tuple[Value, ...]


def split_documents(documents: list[Value], name: str) -> Documents:
    """Return the tasks of a file.

    Args:
        name: name of the file, for messages.

    Raises:
        InvalidInput: the file has no task or too many, or its header is invalid.
        Unsupported: the tasks are a job group, which would run at the same time.
    """
    found = [document for document in documents if document.plain is not None]
    if not found:
        raise InvalidInput(f"{name}:1: the file is empty; expected a task with at least `run`.")
    _check_execution(found[0], name)
    is_header = set(found[0].members) in _HEADERS and len(found) > 1
    title = found[0].members["name"].plain if is_header else None
    tasks = found[1:] if is_header else found
    if len(tasks) > MAX_TASKS:
        raise InvalidInput(f"{name}: a pipeline has at most {MAX_TASKS} tasks, found {len(tasks)}.")
    return Documents(None if title is None else str(title), tuple(tasks))


def _check_execution(first: Value, name: str) -> None:
    execution = first.get("execution")
    if execution is None:
        return
    where = f"{name}:{first.key_lines['execution']}: execution"
    if execution.plain == "parallel":
        raise Unsupported(
            f"{where}: parallel makes a job group, whose tasks run at the same time. Launch each of them "
            "from its own file, or the group with SkyPilot: `sky jobs launch FILE`. Nothing was started."
        )
    if execution.plain not in ("serial", None):
        raise InvalidInput(f"{where}: expected serial, found {execution.plain!r}. Nothing was started.")
