"""Kinds of containers in a state: their items by step of the key path, and their saved forms."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.named_types import NAMED_TYPES, SavedDataclass, SavedEnum, SavedNamedTuple
from holdfast.checkpoint.format.values import EntryRef, TensorRef
from holdfast.checkpoint.state.replication import MarkedObject
from holdfast.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class FittedTensor:
    """A composite tensor that can be rebuilt.

    Args:
        saved: its description.
        live: a tensor of the same type with the same facts. It is only looked at.
    """

    saved: SavedTensor
    live: Any


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


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def saved_container(value: Any, path: str) -> Any:
    """Return the saved form of a container, with its live items.

    A value that is no container of the program's own type is returned as it is.

    Raises:
        InvalidInput: it is a dataclass with state that its fields do not show.
    """
    if type(value) is collections.defaultdict:
        return collections.defaultdict(None, {saved_key(key): item for key, item in value.items()})
    if is_named_tuple(value):
        return SavedNamedTuple(type_name(type(value)), tuple(zip(value._fields, value, strict=True)))
    if is_dataclass(value):
        check_fields(value, path)
        kind = kind_of(value)
        assert kind is not None
        return SavedDataclass(type_name(type(value)), dict(kind.items(value)))
    return value


def saved_leaf(value: Any, path: str) -> Any:
    """Return the saved form of an enum member or a set of them.

    Raises:
        InvalidInput: the member cannot be found by its name.
    """
    if isinstance(value, enum.Enum):
        return SavedEnum(type_name(type(value)), _name_of(value, path))
    if type(value) in (set, frozenset):
        return type(value)(map(saved_key, value))
    return value


def saved_key(key: Any) -> Any:
    """Return the saved form of a dict's key or a set's item."""
    kind = type(key)
    if kind in _PLAIN:
        return key
    if isinstance(key, enum.Enum):
        return SavedEnum(type_name(kind), _name_of(key, repr(key)))
    if is_named_tuple(key):
        fields = zip(key._fields, map(saved_key, key), strict=True)
        return SavedNamedTuple(type_name(kind), tuple(fields))
    return kind(map(saved_key, key)) if kind in (tuple, frozenset) else key


def has_saved_form(tree: Any) -> bool:
    """Return True if an extracted tree needs live values to be restored."""
    if isinstance(tree, (*NAMED_TYPES, SavedTensor)) or type(tree) is collections.defaultdict:
        return True
    if isinstance(tree, (tuple, set, frozenset)) and any(map(has_saved_form, tree)):
        return True
    if isinstance(tree, dict) and any(map(has_saved_form, tree)):
        return True
    kind = kind_of(tree)
    return kind is not None and any(has_saved_form(item) for _, item in kind.items(tree))


def member_of(kind: type[enum.Enum], name: str) -> enum.Enum | None:
    """Return the member of an enum class with a saved name, or None. Runs no code of the class."""
    members = kind.__members__
    if name in members or not issubclass(kind, enum.Flag):
        return members.get(name)
    names = [one for one in name.split("|") if one]
    if any(one not in members for one in names):
        return None
    value = 0
    for one in names:
        value |= members[one].value
    return kind(value)


def _name_of(member: enum.Enum, path: str) -> str:
    """Return the name that `member_of` finds a member by."""
    kind = type(member)
    name = member.name if member.name in kind.__members__ else None
    if name is None and isinstance(member, enum.Flag):
        parts = [
            one for one in kind.__members__.values() if one.value and one.value & member.value == one.value
        ]
        name = "|".join(str(one.name) for one in parts)
    if name is None or member_of(kind, name) is not member:
        raise InvalidInput(
            f"{path} is {member!r}, which has no name in {kind.__qualname__}, so it cannot be saved. Nothing "
            "was written. Save its value instead.",
            key=path,
        )
    return name
