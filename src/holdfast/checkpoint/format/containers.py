"""Kinds of containers: their items by step of the key path, and containers with other items; pure.

All walks over nested values use these, so a new kind of container is one more entry of `_KINDS`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.values import (
    NAMED_TYPES,
    EntryRef,
    SavedDataclass,
    SavedNamedTuple,
    TensorRef,
)

Pair = tuple[Any, Any]  # step of the key path to an item, and the item
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_NOT_CONTAINERS = frozenset({TensorRef, EntryRef, SavedTensor, *NAMED_TYPES})
_get_item = operator.itemgetter(1)
_BUILT_IN = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException)


class ContainerKind(NamedTuple):
    """Functions for one kind of container. None of them runs code of the container's class.

    `items` returns the pairs. `rebuild` returns a container like an existing one with other pairs. `refill`
    puts other pairs into a container itself; None for one that cannot change. `plain` returns pairs as a
    value without types of the program.
    """

    items: Callable[[Any], list[Pair]]
    rebuild: Callable[[Any, Iterable[Pair]], Any]
    refill: Callable[[Any, Iterable[Pair]], object] | None = None
    plain: Callable[[Iterable[Pair]], Any] = dict


def kind_of(value: Any) -> ContainerKind | None:
    """Return the functions for a container, or None for any other value."""
    known = _KINDS.get(type(value))
    if known is not None:
        return known
    if is_named_tuple(value):
        return _NAMED_TUPLE
    if not is_dataclass(value):
        return None
    return _FROZEN_DATACLASS if type(value).__dataclass_params__.frozen else _DATACLASS


def is_named_tuple(value: Any) -> bool:
    """Return True for an instance of a class made by `namedtuple` or `typing.NamedTuple`."""
    kind = type(value)
    return isinstance(value, tuple) and kind is not tuple and type(getattr(kind, "_fields", None)) is tuple


def is_dataclass(value: Any) -> bool:
    """Return True for an instance of a dataclass that is saved field by field."""
    kind = type(value)
    return (
        hasattr(kind, "__dataclass_fields__")
        and not isinstance(value, type)
        and kind not in _NOT_CONTAINERS
        and not isinstance(value, _BUILT_IN)
        and not callable(getattr(kind, "state_dict", None))
        and not any(base.__name__ in ("PretrainedConfig", "PreTrainedConfig") for base in kind.__mro__)
    )


def field_names(value: Any) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(value)]


def other_attributes(value: Any) -> list[str]:
    """Return the attributes of a dataclass that are neither fields nor computed by cached properties."""
    known = set(field_names(value))
    own = getattr(value, "__dict__", {})
    return [name for name in own if name not in known and not _is_cached(type(value), name)]


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)


def _set_fields(value: Any, pairs: Iterable[Pair]) -> Any:
    """Set fields of a dataclass, and drop what its cached properties have computed."""
    own = getattr(value, "__dict__", {})
    for name in [name for name in own if _is_cached(type(value), name)]:
        del own[name]
    for name, item in pairs:
        object.__setattr__(value, name, item)
    return value


def _fields_of(value: Any) -> list[Pair]:
    unset = object()
    found = [(name, getattr(value, name, unset)) for name in field_names(value)]
    return [(name, item) for name, item in found if item is not unset]


def _refill_mapping(value: Any, pairs: Iterable[Pair]) -> None:
    new = dict(pairs)  # of pairs a Counter would count each
    value.clear()
    value.update(new)


def _refill_sequence(value: Any, pairs: Iterable[Pair]) -> None:
    new = list(map(_get_item, pairs))
    value.clear()
    value.extend(new)


def _rebuild_namespace(value: Any, pairs: Iterable[Pair]) -> Any:
    new = type(value)()
    vars(new).update(pairs)
    return new


_MAPPING = ContainerKind(
    lambda value: list(value.items()), lambda value, pairs: type(value)(pairs), _refill_mapping
)
_LIST = ContainerKind(
    lambda value: list(enumerate(value)),
    lambda value, pairs: type(value)(map(_get_item, pairs)),
    _refill_sequence,
    lambda pairs: list(map(_get_item, pairs)),
)
_TUPLE = _LIST._replace(refill=None, plain=lambda pairs: tuple(map(_get_item, pairs)))
_NAMESPACE = ContainerKind(
    lambda value: list(vars(value).items()),
    _rebuild_namespace,
    lambda value, pairs: _refill_mapping(vars(value), pairs),
)
_NAMED_TUPLE = _TUPLE._replace(
    items=lambda value: list(zip(value._fields, value, strict=True)),
    rebuild=lambda value, pairs: tuple.__new__(type(value), map(_get_item, pairs)),
)
_DATACLASS = ContainerKind(
    _fields_of, lambda value, pairs: _set_fields(object.__new__(type(value)), pairs), _set_fields
)
_FROZEN_DATACLASS = _DATACLASS._replace(refill=None)
_KINDS: dict[type, ContainerKind] = {
    dict: _MAPPING,
    collections.OrderedDict: _MAPPING._replace(plain=collections.OrderedDict),
    collections.Counter: _MAPPING._replace(
        rebuild=lambda value, pairs: type(value)(dict(pairs)),
        plain=lambda pairs: collections.Counter(dict(pairs)),
    ),
    collections.defaultdict: _MAPPING._replace(
        rebuild=lambda value, pairs: collections.defaultdict(value.default_factory, pairs)
    ),
    list: _LIST,
    tuple: _TUPLE,
    collections.deque: _LIST._replace(
        rebuild=lambda value, pairs: collections.deque(map(_get_item, pairs), maxlen=value.maxlen)
    ),
    **dict.fromkeys(NAMESPACES, _NAMESPACE),
    SavedNamedTuple: ContainerKind(
        lambda value: list(value.fields),
        lambda value, pairs: SavedNamedTuple(value.type, tuple(pairs)),
        plain=_TUPLE.plain,
    ),
    SavedDataclass: ContainerKind(
        lambda value: list(value.fields.items()), lambda value, pairs: SavedDataclass(value.type, dict(pairs))
    ),
    SavedTensor: ContainerKind(
        lambda value: list(value.inner.items()), lambda value, pairs: replace(value, inner=dict(pairs))
    ),
}
