"""Saved forms of values whose type is a class of the program: the class is only named."""

from __future__ import annotations

import collections
import enum
from typing import Any

from holdfast.checkpoint.format.composites import SavedTensor
from holdfast.checkpoint.format.named_types import NAMED_TYPES, SavedDataclass, SavedEnum, SavedNamedTuple
from holdfast.checkpoint.state.containers import (
    check_fields,
    is_dataclass,
    is_named_tuple,
    kind_of,
    type_name,
)
from holdfast.errors import InvalidInput

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
