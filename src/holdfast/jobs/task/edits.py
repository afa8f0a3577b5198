"""Changes to a parsed task: aliases, variables, and options of the command line are put in; pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.jobs.task.amounts import Accelerators, parse_accelerators
from holdfast.jobs.task.document import TaskProblem, Value

ALTERNATIVES = ("any_of", "ordered")  # keys of `resources` with lists of alternative resources
_ALIASES = {"gpus": "accelerators"}  # of keys of resources. Source: skypilot 0.14.1, sky/resources.py


def replace_aliases(task: Value) -> Value:
    """Return a task whose `resources` have no aliases. One beside its own name stays, as a mistake."""

    def replaced(place: Value) -> Value:
        for alias, name in _ALIASES.items():
            if alias in place.members and name not in place.members:
                line, member = place.key_lines[alias], place.members[alias]
                place = place.without_member(alias).with_member(name, member)
                place = dataclasses.replace(place, key_lines={**place.key_lines, name: line})
        return place

    return _with_resources(task, replaced)


def fill_in_mounts(task: Value, variables: Mapping[str, str]) -> Value:
    """Return a task with variables replaced in the values of `file_mounts`. Its keys stay."""
    mounts = task.get("file_mounts")
    if mounts.kind != "map":
        return task
    return task.with_member("file_mounts", _filled(mounts, variables))


def set_resource(task: Value, key: str, value: str | int | None) -> Value:
    """Return a task with another value of a key, in all alternatives of its resources."""
    if task.get("resources").kind != "map":
        task = task.with_member("resources", Value(0, {}, kind="map"))
    task = _with_resources(task, lambda place: place.without_member(key))
    return task.with_member("resources", task.members["resources"].with_member(key, Value(0, value)))


def unfold_accelerators(task: Value) -> Value:
    """Return a task whose accelerators are in a form that SkyPilot parses."""

    def unfolded(place: Value) -> Value:
        asked = place.get("accelerators")
        read = parse_accelerators(asked.plain)
        if not isinstance(read, Accelerators) or not read.is_folded:
            return place
        return place.with_member("accelerators", Value(asked.line, read.plain()))

    return _with_resources(task, unfolded)


def alternatives(resources: Value) -> tuple[Value, ...]:
    """Return the alternatives of resources, or only the resources themselves."""
    return tuple(place for _, place in places(resources))[1:] or (resources,)


def places(resources: Value) -> Iterator[tuple[str, Value]]:
    """Yield the resources and their alternatives, with their paths."""
    yield "resources", resources
    for key in ALTERNATIVES:
        for number, item in enumerate(resources.get(key).items):
            yield f"resources.{key}[{number}]", item


def _with_resources(task: Value, change: Callable[[Value], Value]) -> Value:
    """Return a task with a change in its resources and in each of their alternatives."""
    resources = task.get("resources")
    if resources.kind != "map":
        return task
    resources = change(resources)
    for key in ALTERNATIVES:
        member = resources.get(key)
        if member.kind == "list":
            items = tuple(change(item) if item.kind == "map" else item for item in member.items)
            resources = resources.with_member(key, member.with_items(items))
    return task.with_member("resources", resources)


def _filled(value: Value, variables: Mapping[str, str]) -> Value:
    if value.kind == "list":
        return value.with_items(tuple(_filled(item, variables) for item in value.items))
    if value.kind == "map":
        members = {key: _filled(member, variables) for key, member in value.members.items()}
        plain = {key: member.plain for key, member in members.items()}
        return Value(value.line, plain, members, value.key_lines, kind="map")
    return dataclasses.replace(value, plain=fill_in(value.plain, variables))


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)\b")


def parse_variables(value: Value, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file and of the command line that have a value."""
    found: dict[str, str] = {}
    for name, member in value.members.items():
        if member.plain is not None:
            found[name] = str(member.plain)  # as from SkyPilot, `yes` is True
    return {**found, **given}


def variable_problems(
    value: Value, given: Mapping[str, str], *, where: str, option: str
) -> Iterator[TaskProblem]:
    """Yield problems of names that shells do not accept, and of variables without a value."""
    named = [(name, member.plain, value.key_lines[name]) for name, member in value.members.items()]
    named += [(str(item.plain), None, item.line) for item in value.items]
    for name, plain, line in named:
        if not is_variable_name(name):
            yield TaskProblem(line, f"{where}.{name}", f"expected the name of a variable, found {name!r}")
        elif "\0" in str(plain):
            yield TaskProblem(line, f"{where}.{name}", "expected a text without NUL characters")
        elif plain is None and name not in given:
            how = f"{option} {name}=VALUE, or {option} {name} if this shell has it"
            what = f"{name} has no value: give it here, or with {how}"
            yield TaskProblem(line, f"{where}.{name}", what)


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
