"""Values of a checkpoint as text: tagged JSON is formatted as Python would, without decoding it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_CHARS = 100
"""Longest text of a value in a table. JSON output has the whole value."""

_BRACKETS = {"$tuple": "()", "$set": "{}", "$frozenset": "{}"}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and tagged JSON of each value in mappings and lists, except tensors."""
    if isinstance(value, dict) and not _tag(value):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, dict) and _tag(value) in ("$dict", "$odict", "$counter"):
        for key, item in value[_tag(value)]:
            yield from leaves(item, f"{path}[{format_value(key)}]")
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif not (isinstance(value, dict) and _tag(value) == "$tensor"):
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


def _tagged(tag: str, body: Any) -> str:
    if tag in _BRACKETS:
        opening, closing = _BRACKETS[tag]
        return opening + _items(body) + closing
    if tag in ("$int", "$float", "$decimal", "$path", "$uuid", "$datetime", "$date"):
        return str(body)
    if tag in ("$bytes", "$bytearray"):
        return f"{len(body) * 3 // 4 - body.count('=')} bytes"
    if tag in ("$ndarray", "$npscalar"):
        return f"array of {body[0]}, shape {body[1]}"
    if tag == "$slice":
        return f"slice({_items(body)})"
    if tag == "$torch":
        return f"torch.{body[0]} {body[1]}"
    if tag == "$tensor":
        return f"tensor {body}"
    return f"{tag[1:]} {json.dumps(body)}"
