"""Kinds of containers in a state: their items with the steps of the key path, and copies with other items."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.named_types import NAMED_TYPES, SavedDataclass, SavedNamedTuple
from holdfast.checkpoint.format.values import EntryRef, TensorRef
from holdfast.checkpoint.state.fitted_tensor import FittedTensor
from holdfast.checkpoint.state.replication import MarkedObject
from holdfast.errors import InvalidInput

_NOT_CONTAINERS = frozenset({TensorRef, EntryRef, SavedTensor, FittedTensor, MarkedObject, *NAMED_TYPES})
_BUILT_IN = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException)


class ContainerKind(NamedTuple):
    """Functions for one kind of container.

    `items` returns pairs of a step of the key path and an item. `rebuild` returns a container like an
    existing one with other items, given in the same order; it runs no code of the container's class.
    """

    items: Callable[[Any], list[tuple[Any, Any]]]
    rebuild: Callable[[Any, list[Any]], Any]


def kind_of(value: Any) -> ContainerKind | None:
    """Return the functions for a container, or None for any other value."""
    kind = type(value)
    known = _KINDS.get(kind)
    if known is not None:
        return known
    if is_named_tuple(value):
        return _NAMED_TUPLE
    return _DATACLASS if is_dataclass(value) else None


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
        and not any(one.__name__ in ("PretrainedConfig", "PreTrainedConfig") for one in kind.__mro__)
    )


def is_frozen(value: Any) -> bool:
    """Return True for an instance of a frozen dataclass."""
    return type(value).__dataclass_params__.frozen


def field_names(value: Any) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(value)]


def set_fields(value: Any, fields: dict[str, Any]) -> Any:
    """Set fields of a dataclass, and drop what its cached properties have computed. Runs no code of it."""
    own = getattr(value, "__dict__", {})
    for name in [name for name in own if _is_cached(type(value), name)]:
        del own[name]
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    return value


def new_dataclass(kind: type, fields: dict[str, Any]) -> Any:
    """Return an instance with these fields, without calling its constructor."""
    return set_fields(object.__new__(kind), fields)


def other_attributes(value: Any) -> list[str]:
    """Return the attributes of a dataclass that are neither fields nor computed by cached properties."""
    known = set(field_names(value))
    own = getattr(value, "__dict__", {})
    return [name for name in own if name not in known and not _is_cached(type(value), name)]


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    unset = object()
    found = [(name, getattr(value, name, unset)) for name in field_names(value)]
    return [(name, item) for name, item in found if item is not unset]


def _items_of_mapping(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items())


def _items_of_sequence(value: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(value))


def _items_of_namespace(value: Any) -> list[tuple[str, Any]]:
    return list(vars(value).items())


def _rebuild_mapping(value: Any, items: list[Any]) -> Any:
    return type(value)(zip(value, items, strict=True))


def _rebuild_namespace(value: Any, items: list[Any]) -> Any:
    new = type(value)()
    vars(new).update(zip(vars(value), items, strict=True))
    return new


_MAPPING = ContainerKind(_items_of_mapping, _rebuild_mapping)
_SEQUENCE = ContainerKind(_items_of_sequence, lambda value, items: type(value)(items))
_NAMESPACE = ContainerKind(_items_of_namespace, _rebuild_namespace)
_NAMED_TUPLE = ContainerKind(
    lambda value: list(zip(value._fields, value, strict=True)),
    lambda value, items: tuple.__new__(type(value), items),
)
_DATACLASS = ContainerKind(
    _fields_of,
    lambda value, items: new_dataclass(
        type(value), dict(zip((name for name, _ in _fields_of(value)), items, strict=True))
    ),
)
_KINDS: dict[type, ContainerKind] = {
    dict: _MAPPING,
    collections.OrderedDict: _MAPPING,
    collections.defaultdict: ContainerKind(
        _items_of_mapping,
        lambda value, items: collections.defaultdict(value.default_factory, zip(value, items, strict=True)),
    ),
    list: _SEQUENCE,
    tuple: _SEQUENCE,
    collections.deque: ContainerKind(
        _items_of_sequence, lambda value, items: collections.deque(items, maxlen=value.maxlen)
    ),
    argparse.Namespace: _NAMESPACE,
    types.SimpleNamespace: _NAMESPACE,
    SavedNamedTuple: ContainerKind(
        lambda value: list(value.fields),
        lambda value, items: SavedNamedTuple(
            value.type, tuple(zip((name for name, _ in value.fields), items, strict=True))
        ),
    ),
    SavedTensor: ContainerKind(
        lambda value: list(value.inner.items()),
        lambda value, items: SavedTensor(value.type, dict(zip(value.inner, items, strict=True)), value.facts),
    ),
    FittedTensor: ContainerKind(
        lambda value: list(value.saved.inner.items()),
        lambda value, items: FittedTensor(
            SavedTensor(
                value.saved.type, dict(zip(value.saved.inner, items, strict=True)), value.saved.facts
            ),
            value.live,
        ),
    ),
    SavedDataclass: ContainerKind(
        lambda value: list(value.fields.items()),
        lambda value, items: SavedDataclass(value.type, dict(zip(value.fields, items, strict=True))),
    ),
}


def type_name(kind: type) -> str:
    """Return the name of a class as a checkpoint has it: module, colon, qualified name."""
    return f"{kind.__module__}:{kind.__qualname__}"


def has_name(kind: type, name: str) -> bool:
    """Return True if a class has a saved name. The script that was started has any module's name."""
    if type_name(kind) == name:
        return True
    module, _, qualified = name.partition(":")
    return qualified == kind.__qualname__ and "__main__" in (module, kind.__module__)


def check_fields(value: Any, path: str) -> None:
    """Raise if a dataclass has state that its fields do not show.

    Raises:
        InvalidInput: it has other attributes, or a field without a value.
    """
    if others := other_attributes(value):
        raise InvalidInput(
            f"{path} is a {type(value).__qualname__} with attributes that are not fields of this dataclass: "
            f"{', '.join(others[:10])}. They would be lost. Nothing was written. Declare them as fields "
            "(init=False), or give the class state_dict() and load_state_dict().",
            key=path,
        )
    found = {name for name, _ in _fields_of(value)}
    if unset := [name for name in field_names(value) if name not in found]:
        raise InvalidInput(
            f"{path} is a {type(value).__qualname__} whose field {unset[0]} is not set, so it cannot be "
            "saved. Nothing was written. Give it a value, such as None.",
            key=path,
        )
