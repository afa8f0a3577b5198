"""Kinds of objects that are entries of a state by themselves, also inside containers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from holdfast.checkpoint.state.containers import kind_of
from holdfast.checkpoint.state.replication import MarkedObject

_SIMPLE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter}
)
"""Types that are neither entries nor containers."""


def is_stateful(value: Any) -> bool:
    """Return True if an object has state_dict() and load_state_dict()."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_follower(value: Any) -> bool:
    """Return True if an object counts completed steps, such as the position in the data."""
    return callable(getattr(value, "complete_steps", None)) and not isinstance(value, type)


def is_generator(value: Any) -> bool:
    """Return True for a torch, python or numpy random number generator."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def is_entry(value: Any) -> bool:
    """Return True for an object that is always saved under its own key.

    These are modules, optimizers, other objects with state_dict() and load_state_dict(), random number
    generators, and whatever the user has marked.
    """
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, (type, torch.Tensor)):
        return False
    return kind is MarkedObject or is_stateful(value) or is_generator(value)


def nested_entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the key path and object of each entry in a container, at any depth.

    Args:
        path: key path of the container.

    Raises:
        RecursionError: the container contains itself.
    """
    kind = kind_of(value)
    if kind is None or _is_plain(value):
        return
    for step, item in kind.items(value):
        if is_entry(item):
            yield f"{path}.{step}", item
        else:
            yield from nested_entries(item, f"{path}.{step}")


def holds_entry(value: Any) -> bool:
    """Return True if a value is an entry or a container of one."""
    return is_entry(value) or next(nested_entries(value, ""), None) is not None


def has_only_entries(value: Any) -> bool:
    """Return True for a container of entries, or of such containers, without other values."""
    kind = kind_of(value)
    items = [] if kind is None else [item for _, item in kind.items(value)]
    return bool(items) and all(is_entry(item) or has_only_entries(item) for item in items)


def _is_plain(value: Any) -> bool:
    """Return True if a value certainly holds no entries. Quick, since every save looks at all containers."""
    kind = type(value)
    if kind in _SIMPLE:
        return True
    items = value.values() if kind is dict else value if kind is list or kind is tuple else None
    return items is not None and (_SIMPLE.issuperset(map(type, items)) or all(map(_is_plain, items)))
