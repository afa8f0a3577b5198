"""Changes to the document of a task: aliases, variables, and options of the command line are put in."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.jobs.task.amounts import Accelerators, parse_accelerators
from holdfast.jobs.task.document import TaskDocument
from holdfast.jobs.task.model import value_at

ALTERNATIVES = ("any_of", "ordered")  # keys of `resources` with lists of alternative resources


def replace_aliases(task: TaskDocument) -> None:
    """Rename `gpus` in `resources` to `accelerators`. One beside the other stays, as a mistake.

    Source: skypilot 0.14.1, sky/resources.py.
    """
    for where, place in places(task.plain):
        if "gpus" in place and "accelerators" not in place:
            place["accelerators"] = place.pop("gpus")
            task.rename(f"{where}.gpus", f"{where}.accelerators")


def set_value(task: TaskDocument, key: str, value: str | int) -> None:
    """Set a key at the top of a task to a value of the command line, which has the line 0."""
    task.plain[key] = value
    task.key_lines.setdefault(key, 0)
    task.value_lines[key] = 0


def set_resource(task: TaskDocument, key: str, value: str | int | None) -> None:
    """Set a key of `resources` to a value of the command line, and remove it from all alternatives."""
    if not isinstance(task.plain.get("resources"), dict):
        task.plain["resources"] = {}
        task.key_lines.setdefault("resources", 0)
    for _, place in places(task.plain):
        place.pop(key, None)
    task.plain["resources"][key] = value
    task.key_lines[f"resources.{key}"] = task.value_lines[f"resources.{key}"] = 0


def unfolded(resources: Any) -> Any:
    """Return resources whose accelerators are in a form that SkyPilot parses."""
    resources = copy.deepcopy(resources)
    for _, place in places({"resources": resources}):
        read = parse_accelerators(place.get("accelerators"))
        if isinstance(read, Accelerators) and read.is_folded:
            place["accelerators"] = read.plain()
    return resources


def places(task: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the resources of a task and their alternatives, with their paths, if they are maps."""
    resources = value_at(task, "resources")
    if not isinstance(resources, dict):
        return
    yield "resources", resources
    for key in ALTERNATIVES:
        items = resources.get(key)
        for number, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict):
                yield f"resources.{key}[{number}]", item


def resource_values(task: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values of a key in all alternatives. One without its own has that of the resources."""
    first, *others = [place for _, place in places(task)] or [{}]
    return [place.get(key, first.get(key)) for place in others or [first]]


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)\b")


def parse_variables(value: Any, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file and of the command line that have a value."""
    members = value if isinstance(value, dict) else {}
    # As from SkyPilot, `yes` is True.
    return {**{str(name): str(plain) for name, plain in members.items() if plain is not None}, **given}


def is_variable_name(text: str) -> bool:
    """Return True for a name that shells accept."""
    return _NAME.fullmatch(text) is not None


def fill_in(plain: Any, variables: Mapping[str, str]) -> Any:
    """Return a value with `${NAME}` and `$NAME` replaced by `variables` in all its texts."""
    if isinstance(plain, str):
        return _REFERENCE.sub(lambda found: variables.get(found[1] or found[2], found[0]), plain)
    if isinstance(plain, Mapping):
        return {fill_in(key, variables): fill_in(value, variables) for key, value in plain.items()}
    if isinstance(plain, list):
        return [fill_in(item, variables) for item in plain]
    return plain
