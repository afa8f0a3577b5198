"""Changes to a parsed task: aliases, variables, and options of the command line are put in; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from holdfast.jobs.task.accelerators import Accelerators, parse_accelerators
from holdfast.jobs.task.document import Value
from holdfast.jobs.task.variables import fill_in

ALTERNATIVES = ("any_of", "ordered")
"""Keys of `resources` with lists of alternative resources."""
_ALIASES = {"gpus": "accelerators"}
"""Other names of keys of resources. Source: skypilot 0.14.1, sky/resources.py."""


def replace_aliases(task: Value) -> Value:
    """Return a task whose `resources` have no aliases. One beside its own name stays, as a mistake."""
    return _with_resources(task, _without_aliases)


def fill_in_mounts(task: Value, variables: Mapping[str, str]) -> Value:
    """Return a task with variables replaced in the values of `file_mounts`. Its keys stay."""
    mounts = task.get("file_mounts")
    if mounts is None or mounts.kind != "map":
        return task
    return task.with_member("file_mounts", _filled(mounts, variables))


def set_accelerators(task: Value, accelerators: str) -> Value:
    """Return a task with other accelerators, in all alternatives of its resources. `none` means no GPU."""
    return set_resource(task, "accelerators", None if accelerators.lower() == "none" else accelerators)


def set_resource(task: Value, key: str, value: str | int | None) -> Value:
    """Return a task with another value of a key, in all alternatives of its resources."""
    resources = task.get("resources")
    if resources is None or resources.kind != "map":
        task = task.with_member("resources", Value(0, {}, kind="map"))
    task = _with_resources(task, lambda place: place.without_member(key))
    return task.with_member("resources", task.members["resources"].with_member(key, Value(0, value)))


def unfold_accelerators(task: Value) -> Value:
    """Return a task whose accelerators are in a form that SkyPilot parses."""

    def unfolded(place: Value) -> Value:
        asked = place.get("accelerators")
        read = parse_accelerators(asked.plain) if asked is not None else None
        if asked is None or not isinstance(read, Accelerators) or not read.is_folded:
            return place
        return place.with_member("accelerators", Value(asked.line, read.plain()))

    return _with_resources(task, unfolded)


def alternatives(resources: Value) -> tuple[Value, ...]:
    """Return the alternatives of resources, or only the resources themselves."""
    listed = [resources.get(key) for key in ALTERNATIVES]
    return tuple(item for one in listed if one is not None for item in one.items) or (resources,)


def places(resources: Value) -> tuple[Value, ...]:
    """Return the resources and their alternatives, if any."""
    found = alternatives(resources)
    return found if found == (resources,) else (resources, *found)


def _with_resources(task: Value, change: Callable[[Value], Value]) -> Value:
    """Return a task with a change in its resources and in each of their alternatives."""
    resources = task.get("resources")
    if resources is None or resources.kind != "map":
        return task
    resources = change(resources)
    for key in ALTERNATIVES:
        member = resources.get(key)
        if member is not None and member.kind == "list":
            items = tuple(change(item) if item.kind == "map" else item for item in member.items)
            resources = resources.with_member(key, member.with_items(items))
    return task.with_member("resources", resources)


def _without_aliases(resources: Value) -> Value:
    for alias, name in _ALIASES.items():
        member = resources.get(alias)
        if member is not None and resources.get(name) is None:
            line = resources.key_lines[alias]
            resources = resources.without_member(alias).with_member(name, member)
            resources = dataclasses.replace(resources, key_lines={**resources.key_lines, name: line})
    return resources


def _filled(value: Value, variables: Mapping[str, str]) -> Value:
    if value.kind == "list":
        return value.with_items(tuple(_filled(item, variables) for item in value.items))
    if value.kind == "map":
        members = {key: _filled(member, variables) for key, member in value.members.items()}
        plain = {key: member.plain for key, member in members.items()}
        return Value(value.line, plain, members, value.key_lines, kind="map")
    return dataclasses.replace(value, plain=fill_in(value.plain, variables))
