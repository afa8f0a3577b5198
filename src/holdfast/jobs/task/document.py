"""Parser of YAML into values with line numbers. Rejects duplicate keys."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import ReaderError

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.task.model import Task

MAX_CHARS = 1 << 17
MAX_VALUES = 20_000  # limit for the values of a task file, with aliases expanded
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Value:
    """Value in a task file, with its position."""

    line: int  # from 1
    plain: Any  # str, int, float, bool, None, a date; for a map or a list its plain form
    members: dict[str, Value] = field(default_factory=dict)  # values of a map, by key
    key_lines: dict[str, int] = field(default_factory=dict)  # line of each key of a map
    items: tuple[Value, ...] = ()  # values of a list
    kind: str = "scalar"  # or map, list

    def get(self, key: str) -> Value:
        """Return a member of a map, or an empty value."""
        return self.members.get(key, EMPTY)

    def with_member(self, key: str, member: Value) -> Value:
        """Return a map with a member added or replaced."""
        return Value(
            self.line,
            {**self.plain, key: member.plain},
            {**self.members, key: member},
            {**self.key_lines, key: self.key_lines.get(key, member.line)},
            kind="map",
        )

    def without_member(self, key: str) -> Value:
        """Return a map without a member."""
        return Value(
            self.line,
            {name: plain for name, plain in self.plain.items() if str(name) != key},
            {name: member for name, member in self.members.items() if name != key},
            {name: line for name, line in self.key_lines.items() if name != key},
            kind="map",
        )

    def with_items(self, items: tuple[Value, ...]) -> Value:
        """Return a list with other items."""
        return Value(self.line, [item.plain for item in items], items=items, kind="list")


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """Problem in a task file."""

    line: int
    where: str  # path of keys, such as resources.accelerators
    what: str  # expected and found


EMPTY = Value(0, None)


def parse_documents(text: str, name: str) -> list[Value]:
    """Parse the documents of a YAML file, without empty ones."""
    if len(text) > MAX_CHARS:
        raise InvalidInput(f"{name} has {len(text)} characters; a task file has at most {MAX_CHARS}.")
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        _check_expansion(nodes, name)
        loader = yaml.SafeLoader("")
        return [_value(node, loader, name) for node in nodes if node is not None]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InvalidInput(f"{name}:{line}: invalid YAML: {error.problem or error}.") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        number = int(error.character)
        advice = "Remove it." if number else "Save it as UTF-8."
        raise InvalidInput(f"{name}:{line}: U+{number:04X} is not allowed in YAML. {advice}") from error
    except yaml.YAMLError as error:
        raise InvalidInput(f"{name}: invalid YAML: {error}.") from error
    except RecursionError as error:
        raise Unsupported(f"{name}: an anchor contains itself, or values are nested too deeply.") from error


def _value(node: Any, loader: yaml.SafeLoader, name: str) -> Value:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        _check_duplicates(node, name)
        loader.flatten_mapping(node)  # `<<: *anchor`; the map's own keys come later and take precedence
        return _map(node, loader, name)
    if isinstance(node, yaml.SequenceNode):
        return Value(line, None).with_items(tuple(_value(item, loader, name) for item in node.value))
    return Value(line, _scalar(node, loader, name))


def _scalar(node: Any, loader: yaml.SafeLoader, name: str) -> Any:
    line = node.start_mark.line + 1
    try:
        value = loader.construct_object(node)
        hash(value)
    except yaml.YAMLError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError) as error:
        raise InvalidInput(f"{name}:{line}: invalid value {node.value[:100]!r}: {error}.") from error
    if isinstance(value, int) and value.bit_length() > 64:
        raise InvalidInput(f"{name}:{line}: an integer of {value.bit_length()} bits is too large.")
    return value


def _check_expansion(nodes: list[Any], name: str) -> None:
    """Check that the document is not too large with its aliases expanded."""
    sizes: dict[int, int] = {}

    def size_of(node: Any, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{name}: values are nested more than {MAX_DEPTH} deep.")
        known = sizes.get(id(node))
        if known is None:
            sizes[id(node)] = 0  # until it is computed: a node met again before that contains itself
            inner = () if isinstance(node, yaml.ScalarNode) else node.value
            parts = itertools.chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
            known = sizes[id(node)] = 1 + sum(size_of(part, depth + 1) for part in parts)
        if not known:
            raise Unsupported(f"{name}: an anchor contains itself.")
        return known

    if sum(size_of(node, 0) for node in nodes if node is not None) > MAX_VALUES:
        raise InvalidInput(f"{name}: with its aliases it has more than {MAX_VALUES} values.")


def _map(node: yaml.MappingNode, loader: yaml.SafeLoader, name: str) -> Value:
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
    return Value(node.start_mark.line + 1, plain, members, key_lines, kind="map")


def _check_duplicates(node: yaml.MappingNode, name: str) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        key = (key_node.tag, key_node.value)
        if key in lines:
            raise InvalidInput(
                f"{name}:{line}: duplicate key {key_node.value!r}, also in line {lines[key]}. YAML would "
                "silently use the last one. Remove one of them."
            )
        lines[key] = line


class _Dumper(yaml.SafeDumper):
    """Dumper that writes scripts as blocks, so that they are readable."""


def _represent(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def to_yaml(task: Task) -> str:
    """Return the normalized file, without values of secrets: `sky` receives these with `--secret NAME`."""
    return yaml.dump(dict(task.document), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
