"""Plain forms of decoded values for readers without the program: dicts, tuples and names; pure."""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.format.composites import UNDER, SavedTensor, composite_items
from holdfast.checkpoint.format.named_types import SavedDataclass, SavedEnum, SavedNamedTuple
from holdfast.checkpoint.format.values import EntryRef


def plain_form(value: Any) -> Any:
    """Return a decoded value without types of the program.

    A dataclass or a namespace becomes a dict of its fields, a named tuple a tuple, an enum member its name,
    and a defaultdict a dict. A composite tensor becomes a dict of its inner tensors, with its type and facts.
    """
    if isinstance(value, SavedTensor):
        return {name: plain_form(item) for name, item in composite_items(value).items()}
    if isinstance(value, SavedEnum):
        return value.name
    if isinstance(value, SavedNamedTuple):
        return tuple(plain_form(item) for _, item in value.fields)
    if isinstance(value, SavedDataclass):
        return {name: plain_form(item) for name, item in value.fields.items()}
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return {name: plain_form(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        kind = type(value) if type(value) in (collections.OrderedDict, collections.Counter) else dict
        return kind({plain_form(key): plain_form(item) for key, item in placed_composites(value).items()})
    if isinstance(value, collections.deque):
        return collections.deque(map(plain_form, value), value.maxlen)
    return type(value)(map(plain_form, value)) if type(value) in (list, tuple, set, frozenset) else value


def placed_composites(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a module's values with each composite tensor under its own name; another dict as it is."""
    under = value.get(UNDER)
    if not isinstance(under, dict):
        return value
    return {**{key: item for key, item in value.items() if key != UNDER}, **under}


def place_entries(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with each object in its container instead of under its key path.

    Args:
        tree: plain forms by key, with an `EntryRef` for each object. It is only read.
    """
    waiting = dict(tree)
    placed = {key: _Placing(waiting).place(value, key) for key, value in tree.items()}
    return {key: value for key, value in placed.items() if key in waiting}


_GONE = object()  # in place of a reference that leads nowhere


class _Placing:
    """One walk that takes objects out of `waiting`, by key path."""

    def __init__(self, waiting: dict[str, Any]) -> None:
        self._waiting = waiting

    def place(self, value: Any, path: str) -> Any:
        if isinstance(value, EntryRef):
            # An object's key is the path of its place. So no document can put one into itself.
            found = self._waiting.pop(path, _GONE) if value.key == path else _GONE
            return _GONE if isinstance(found, EntryRef) else found
        if type(value) in (dict, collections.OrderedDict):
            pairs = ((key, self.place(item, f"{path}.{key}")) for key, item in value.items())
            return type(value)((key, item) for key, item in pairs if item is not _GONE)
        if type(value) in (list, tuple):
            items = (self.place(item, f"{path}.{i}") for i, item in enumerate(value))
            return type(value)(item for item in items if item is not _GONE)
        return value
