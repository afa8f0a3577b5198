"""Values of a checkpoint as text: tagged JSON is formatted as Python would, without decoding it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.checkpoint.format.composites import UNDER

MAX_CHARS = 100
"""Longest text of a value in a table. JSON output has the whole value."""

_FIELDS = ("$dataclass", "$namedtuple", "$namespace", "$simplenamespace")
_BRACKETS = {"$tuple": "()", "$set": "{}", "$frozenset": "{}"}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and tagged JSON of each value, except tensors and objects."""
    tag = _tag(value) if isinstance(value, dict) else ""
    if isinstance(value, dict) and not tag:
        for key, item in value.items():
            yield from leaves(item, path if key == UNDER else f"{path}.{key}")
    elif tag in ("$dict", "$odict", "$counter", "$defaultdict"):
        for key, item in value[tag]:
            yield from leaves(item, f"{path}[{format_value(key)}]")
    elif tag in _FIELDS:
        for name, item in _fields(tag, value[tag]):
            yield from leaves(item, f"{path}.{name}")
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif tag not in ("$tensor", "$entry"):
        yield path, value


def format_value(value: Any) -> str:
    """Format a value as Python would, in one line of limited length."""
    text = _text(value)
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 4]} ..."


def _tag(value: dict[str, Any]) -> str:
    return next((key for key in value if key.startswith("$")), "") if len(value) == 1 else ""


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + _items(value) + "]"
    if not isinstance(value, dict):
        return repr(value)
    tag = _tag(value)
    if not tag:
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    return _tagged(tag, value[tag])


def _items(values: list[Any]) -> str:
    """Format the first items of a list, and their number if there are more."""
    shown = ", ".join(_text(item) for item in values[:16])
    return shown if len(values) <= 16 else f"{shown}, ... {len(values)} in all"


def _fields(tag: str, body: Any) -> list[tuple[str, Any]]:
    """Return names and tagged JSON of the fields of a value with fields."""
    fields = body[1] if tag in ("$dataclass", "$namedtuple") else body
    return [(name, item) for name, item in (fields.items() if isinstance(fields, dict) else fields)]


def _type_of(name: str) -> str:
    """Return the last part of a saved name of a class."""
    return name.rpartition(":")[2].rpartition(".")[2]


def _tagged(tag: str, body: Any) -> str:
    if tag in _BRACKETS:
        opening, closing = _BRACKETS[tag]
        return opening + _items(body) + closing
    if tag in _FIELDS:
        kind = _type_of(body[0]) if tag in ("$dataclass", "$namedtuple") else tag[1:]
        return f"{kind}({', '.join(f'{name}={_text(item)}' for name, item in _fields(tag, body))})"
    return _TEXTS[tag](body) if tag in _TEXTS else f"{tag[1:]} {json.dumps(body)}"


def _structured(body: list[Any]) -> str:
    names = ", ".join(str(row[0]) for row in body[0]["fields"])
    return f"array with fields {names}" + ("" if body[1] is None else f", shape {body[1]}")


_TEXTS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("$int", "$float", "$decimal", "$path", "$uuid", "$datetime", "$date"), str),
    **dict.fromkeys(("$bytes", "$bytearray"), lambda body: f"{len(body) * 3 // 4 - body.count('=')} bytes"),
    **dict.fromkeys(("$ndarray", "$npscalar"), lambda body: f"array of {body[0]}, shape {body[1]}"),
    "$slice": lambda body: f"slice({_items(body)})",
    "$torch": lambda body: f"torch.{body[0]} {body[1]}",
    "$tensor": lambda body: f"tensor {body}",
    "$entry": lambda body: f"object {body}",
    "$enum": lambda body: f"{_type_of(body[0])}.{body[1]}",
    "$structured": _structured,
    "$composite": lambda body: f"{_type_of(body[0])} tensor of {', '.join(body[1])}, {_text(body[2])}",
}
