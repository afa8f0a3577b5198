"""YAML text -> values that know their lines; as SkyPilot reads it, but no key may stand twice."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import yaml

from holdfast.errors import InvalidInput, Unsupported

MAX_CHARS = 1 << 17
MAX_VALUES = 20_000
"""Values of a task file, each alias counted as what it names."""
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the file, and where it stands."""

    line: int  # from 1
    plain: Any  # str, int, float, bool, None, a date; for a map or a list its plain form
    members: dict[str, Value] = field(default_factory=dict)  # of a map, by key
    key_lines: dict[str, int] = field(default_factory=dict)  # where each key of a map stands
    items: tuple[Value, ...] = ()  # of a list
    kind: str = "scalar"  # or map, list

    def get(self, key: str) -> Value | None:
        """A member of a map; None if it is not there, or this is no map."""
        return self.members.get(key)


def read_documents(text: str, name: str) -> list[Value]:
    """The documents of a YAML file; empty ones are left out.

    Raises:
        InvalidInput: it is no YAML, or a key stands twice in a map.
        Unsupported: it holds what no task file needs: anchors that contain themselves, objects.
    """
    if len(text) > MAX_CHARS:
        raise InvalidInput(f"{name} has {len(text)} characters; a task file has at most {MAX_CHARS}.")
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        _check_expansion(nodes, name)
        loader = yaml.SafeLoader("")
        return [_value(node, loader, name) for node in nodes if node is not None]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InvalidInput(f"{name}:{line}: this is no YAML: {error.problem or error}.") from error
    except yaml.YAMLError as error:
        raise InvalidInput(f"{name}: this is no YAML: {error}.") from error
    except RecursionError as error:
        raise Unsupported(f"{name}: an anchor contains itself, or values are nested too deeply.") from error


def _value(node: Any, loader: yaml.SafeLoader, name: str) -> Value:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        _refuse_twins(node, name)
        loader.flatten_mapping(
            node
        )  # `<<: *anchor`; what stands in the map itself comes after it, and counts
        return _map(node, loader, name, line)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_value(item, loader, name) for item in node.value)
        return Value(line, [item.plain for item in items], items=items, kind="list")
    return Value(line, _scalar(node, loader, name))


def _scalar(node: Any, loader: yaml.SafeLoader, name: str) -> Any:
    try:
        value = loader.construct_object(node)
        hash(value)
    except yaml.YAMLError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError) as error:
        line = node.start_mark.line + 1
        raise InvalidInput(f"{name}:{line}: {node.value[:100]!r} is no value: {error}.") from error
    if isinstance(value, int) and value.bit_length() > 64:
        line = node.start_mark.line + 1
        raise InvalidInput(f"{name}:{line}: an integer of {value.bit_length()} bits is too large.")
    return value


def _check_expansion(nodes: list[Any], name: str) -> None:
    """Refuse what would be very large once every alias stands for what it names.

    Raises:
        InvalidInput: it has too many values, or is nested too deeply.
        Unsupported: an anchor contains itself.
    """
    sizes: dict[int, int] = {}

    def size_of(node: Any, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{name}: values are nested more than {MAX_DEPTH} deep.")
        known = sizes.get(id(node))
        if known is None:
            sizes[id(node)] = 0  # until it is known: met again before that, it contains itself
            inner = () if isinstance(node, yaml.ScalarNode) else node.value
            parts = itertools.chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
            known = sizes[id(node)] = 1 + sum(size_of(part, depth + 1) for part in parts)
        if not known:
            raise Unsupported(f"{name}: an anchor contains itself.")
        return known

    if sum(size_of(node, 0) for node in nodes if node is not None) > MAX_VALUES:
        raise InvalidInput(f"{name}: with its aliases it has more than {MAX_VALUES} values.")


def _map(node: yaml.MappingNode, loader: yaml.SafeLoader, name: str, line: int) -> Value:
    members: dict[str, Value] = {}
    key_lines: dict[str, int] = {}
    plain: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise InvalidInput(f"{name}:{key_line}: expected a word as a key, found a {key_node.id}.")
        raw = _scalar(key_node, loader, name)
        key = str(raw)
        members[key] = _value(value_node, loader, name)
        key_lines[key] = key_line
        plain[raw] = members[key].plain
    return Value(line, plain, members, key_lines, kind="map")


def _refuse_twins(node: yaml.MappingNode, name: str) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        key = (key_node.tag, key_node.value)
        if key in lines:
            raise InvalidInput(
                f"{name}:{line}: the key {key_node.value!r} stands in line {lines[key]} too, and YAML would "
                "silently take the last one. Remove one of them."
            )
        lines[key] = line
