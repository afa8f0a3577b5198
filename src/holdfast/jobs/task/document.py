"""Documents of a task file: YAML with line numbers and unique keys, and the changes that are made to it."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from msgspec import Struct
from yaml.reader import ReaderError

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.environment import read_packaged
from holdfast.jobs.task.model import Accelerators, Task, parse_accelerators, value_at

MAX_CHARS = 1 << 17
MAX_VALUES = 20_000  # limit for the values of a task file, with aliases expanded
MAX_DEPTH = 32


@cache
def read_table(name: str) -> Any:
    """Return the values of a YAML file of the folder of jobs, such as k8s/objects.yaml."""
    # The loader in C, which some builds of PyYAML lack, is twenty times as fast.
    return yaml.load(read_packaged(name), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class TaskDocument(Struct, frozen=True):
    """Document of a task file: plain values, and the lines of all keys and values, by path."""

    plain: Any
    key_lines: dict[str, int] = {}  # by path, such as resources.any_of[0].cpus
    value_lines: dict[str, int] = {}  # of their values, which may begin below

    def rename(self, old: str, new: str) -> None:
        """Give the lines of a key, and of all keys in its value, to another key."""
        for lines in (self.key_lines, self.value_lines):
            for path in [path for path in lines if path == old or path.startswith((f"{old}.", f"{old}["))]:
                lines[new + path.removeprefix(old)] = lines.pop(path)


def parse_documents(text: str, name: str) -> list[TaskDocument]:
    """Parse the documents of a YAML file, without empty ones."""
    if len(text) > MAX_CHARS:
        raise InvalidInput(f"{name} has {len(text)} characters; a task file has at most {MAX_CHARS}.")
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        _check_expansion(nodes, name)
        loader = yaml.SafeLoader("")
        return [_document(node, loader, name) for node in nodes if node is not None]
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


def _document(root: yaml.Node, loader: yaml.SafeLoader, name: str) -> TaskDocument:
    key_lines: dict[str, int] = {}
    value_lines: dict[str, int] = {}

    def read(node: Any, where: str) -> Any:
        value_lines[where] = node.start_mark.line + 1
        if isinstance(node, yaml.SequenceNode):
            return [read(item, f"{where}[{number}]") for number, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return _scalar(node, loader, name)
        _check_duplicates(node, name)
        loader.flatten_mapping(node)  # `<<: *anchor`; the map's own keys come later and take precedence
        members: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InvalidInput(f"{name}:{line}: expected a word as a key, found a {key_node.id}.")
            key = _scalar(key_node, loader, name)
            path = f"{where}.{key}" if where else str(key)
            key_lines[path] = line
            members[key] = read(value_node, path)
        return members

    return TaskDocument(read(root, ""), key_lines, value_lines)


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


_Dumper.add_representer(
    str,
    lambda to, text: to.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def to_yaml(task: Task) -> str:
    """Return the normalized file, without values of secrets: `sky` receives these with `--secret NAME`."""
    return yaml.dump(dict(task.document), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
