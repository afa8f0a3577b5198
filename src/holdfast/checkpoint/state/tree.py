"""Trees of values that contain tensors: tensors are extracted, and inserted again.

Values of classes of the program have saved forms, which only name the class. The kinds of containers
are those of `format.containers`. `fitting` walks a saved tree and a live value together.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec import Struct

from holdfast.checkpoint.format import containers
from holdfast.checkpoint.format.composites import DTENSOR, SavedTensor
from holdfast.checkpoint.format.limits import MAX_NAME_CHARS
from holdfast.checkpoint.format.values import (
    NAMED_TYPES,
    EntryRef,
    SavedDataclass,
    SavedEnum,
    SavedNamedTuple,
    TensorRef,
)
from holdfast.checkpoint.state.composites import put_together, take_apart
from holdfast.checkpoint.state.entry import is_entry
from holdfast.checkpoint.state.tensors import is_composite, unsavable
from holdfast.errors import InvalidInput, Unsupported

PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})
"""Types of values and keys that are saved as they are."""


def type_name(kind: type) -> str:
    """Return the name of a class as a checkpoint has it: module, colon, qualified name."""
    return f"{kind.__module__}:{kind.__qualname__}"


def has_name(kind: type, name: str) -> bool:
    """Return True if a class has a saved name. The script that was started has any module's name."""
    if type_name(kind) == name:
        return True
    module, _, qualified = name.partition(":")
    return qualified == kind.__qualname__ and "__main__" in (module, kind.__module__)


def _check_fields(value: Any, found: dict[str, Any], path: str) -> None:
    """Raise if a dataclass has state that its fields do not show, or fields that are not set."""
    if others := containers.other_attributes(value):
        raise InvalidInput(
            f"{path} is a {type(value).__qualname__} with attributes that are not fields of this dataclass: "
            f"{', '.join(others[:10])}. They would be lost. Nothing was written. Declare them as fields "
            "(init=False), or give the class state_dict() and load_state_dict().",
            key=path,
        )
    if unset := [name for name in containers.field_names(value) if name not in found]:
        raise InvalidInput(
            f"{path} is a {type(value).__qualname__} whose field {unset[0]} is not set, so it cannot be "
            "saved. Nothing was written. Give it a value, such as None.",
            key=path,
        )


def saved_container(value: Any, path: str) -> Any:
    """Return the saved form of a container of the program's own type, with its live items; others as is."""
    if type(value) is collections.defaultdict:
        return collections.defaultdict(None, value)
    kind = containers.kind_of(value)
    items = () if kind is None else kind.items(value)
    if containers.is_named_tuple(value):
        return SavedNamedTuple(type_name(type(value)), tuple(items))
    if containers.is_dataclass(value):
        fields = dict(items)
        _check_fields(value, fields, path)
        return SavedDataclass(type_name(type(value)), fields)
    return value


def saved_leaf(value: Any, path: str) -> Any:
    """Return the saved form of an enum member or a set of them."""
    if isinstance(value, enum.Enum):
        return SavedEnum(type_name(type(value)), _name_of(value, path))
    if type(value) in (set, frozenset):
        return type(value)(map(saved_key, value))
    return value


def saved_key(key: Any) -> Any:
    """Return the saved form of a dict's key or a set's item."""
    kind = type(key)
    if kind in PLAIN_TYPES:
        return key
    if isinstance(key, enum.Enum):
        return SavedEnum(type_name(kind), _name_of(key, repr(key)))
    if containers.is_named_tuple(key):
        fields = zip(key._fields, map(saved_key, key), strict=True)
        return SavedNamedTuple(type_name(kind), tuple(fields))
    return kind(map(saved_key, key)) if kind in (tuple, frozenset) else key


def has_saved_form(tree: Any) -> bool:
    """Return True if an extracted tree needs live values to be restored."""
    if isinstance(tree, (*NAMED_TYPES, SavedTensor)) or type(tree) is collections.defaultdict:
        return True
    if isinstance(tree, (tuple, set, frozenset, dict)) and any(map(has_saved_form, tree)):
        return True
    kind = containers.kind_of(tree)
    return kind is not None and any(has_saved_form(item) for _, item in kind.items(tree))


def member_of(kind: type[enum.Enum], name: str) -> enum.Enum | None:
    """Return the member of an enum class with a saved name, or None. Runs no code of the class."""
    members = kind.__members__
    if name in members or not issubclass(kind, enum.Flag):
        return members.get(name)
    flags = [flag for flag in name.split("|") if flag]
    if any(flag not in members for flag in flags):
        return None
    value = 0
    for flag in flags:
        value |= members[flag].value
    return kind(value)


def _name_of(member: enum.Enum, path: str) -> str:
    """Return the name that `member_of` finds a member by."""
    kind = type(member)
    name = member.name if member.name in kind.__members__ else None
    if name is None and isinstance(member, enum.Flag):
        flags = kind.__members__.values()
        name = "|".join(str(one.name) for one in flags if one.value and one.value & member.value == one.value)
    if name is None or member_of(kind, name) is not member:
        raise InvalidInput(
            f"{path} is {member!r}, which has no name in {kind.__qualname__}, so it cannot be saved. Nothing "
            "was written. Save its value instead.",
            key=path,
        )
    return name


_LEAVES = PLAIN_TYPES | {TensorRef}
_PLAIN_CONTAINERS = frozenset({dict, collections.OrderedDict, list, tuple})
"""Containers that have no state of their own, which most values are in."""

Emit = Callable[[str, torch.Tensor], object]


class Extraction(Struct):
    """Walk over trees that takes the tensors out of them."""

    emit: Emit  # receives each tensor with its name
    per_rank: Emit | None = None  # receives those that are different on every rank by their kind
    named_types: bool = False  # replace values of the program's own types by forms to restore live ones from
    entries: bool = False  # replace objects that are entries of their own by an `EntryRef`
    composites: bool = True  # replace composite tensors by a `SavedTensor`, and emit their inner tensors

    def extract(self, value: Any, name: str) -> Any:
        """Return a tree with a `TensorRef` for every tensor, named by the tree's name and its path."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        if len(name) > MAX_NAME_CHARS:
            raise InvalidInput(
                f"The path {name[:60]}... has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed. "
                "Nothing was written. Use shorter keys.",
                key=name[:60],
            )
        if isinstance(value, torch.Tensor):
            if self.composites and is_composite(value):
                return self._composite(value, name)
            self.emit(name, value)
            return TensorRef(name)
        if kind not in _PLAIN_CONTAINERS:
            if self.entries and is_entry(value):
                return EntryRef(name)
            if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
                raise _misplaced(value, name, may_be_entry=self.entries)
            if self.named_types:
                value = saved_container(value, name)
            elif containers.is_named_tuple(value) or containers.is_dataclass(value):
                return value
        return self._items(value, name)

    def _items(self, value: Any, name: str) -> Any:
        container = containers.kind_of(value)
        if container is None:
            return saved_leaf(value, name) if self.named_types else value
        pairs = [(step, self.extract(item, f"{name}.{step}")) for step, item in container.items(value)]
        if self.named_types and isinstance(value, dict) and not PLAIN_TYPES.issuperset(map(type, value)):
            pairs = [(saved_key(key), item) for key, item in pairs]
        return container.rebuild(value, pairs)

    def _composite(self, value: torch.Tensor, name: str) -> SavedTensor:
        try:
            apart = take_apart(value)
        except Unsupported as error:
            raise unsavable(value, name, str(error)) from error
        walk = self
        if apart.type == DTENSOR:
            if self.per_rank is None:
                why = "it is a DTensor over a tensor of another class. Save its to_local()."
                raise unsavable(value, name, why)
            walk = Extraction(self.per_rank, named_types=True)
        inner = {part: walk.extract(item, f"{name}.{part}") for part, item in apart.inner.items()}
        return SavedTensor(apart.type, inner, facts_of(apart, name))


def _misplaced(value: Any, name: str, *, may_be_entry: bool) -> InvalidInput:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if may_be_entry:
        message = (
            f"{name} is a {kind}, which has state_dict() but not load_state_dict(), so it cannot be "
            "restored. Nothing was written. Add load_state_dict() to it, or leave it out of the state."
        )
    else:
        message = (
            f"{name} is a {kind} inside the state of another object. Objects with state_dict() are only "
            "saved as entries of the state, or in containers of it. Nothing was written. Return its "
            "state_dict() there in place of the object, such as in a subclass, and load it in "
            "load_state_dict()."
        )
    return InvalidInput(message, key=name)


def facts_of(apart: SavedTensor, name: str) -> dict[str, Any]:
    """Return the facts about a composite tensor that was taken apart, in their saved forms."""
    if not apart.is_class:
        return apart.facts

    def refuse(path: str, tensor: torch.Tensor) -> None:
        why = "it is in the context of a __tensor_flatten__(). Return its name among the tensors there."
        raise unsavable(tensor, path, why)

    context = Extraction(refuse, named_types=True).extract(apart.facts["context"], f"{name}.<context>")
    return {**apart.facts, "context": context}


def is_plain_value(value: Any) -> bool:
    """Return True for a value or a tuple of values that are saved as they are, and replaced as a whole."""
    kind = type(value)
    return kind in PLAIN_TYPES or (kind is tuple and PLAIN_TYPES.issuperset(map(type, value)))


def references(tree: Any) -> Iterator[str]:
    """Yield names of all tensors that an extracted tree refers to."""
    if isinstance(tree, TensorRef):
        yield tree.name
    elif (kind := containers.kind_of(tree)) is not None:
        for _, item in kind.items(tree):
            if type(item) not in PLAIN_TYPES:
                yield from references(item)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value or a container, once per occurrence."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif (kind := containers.kind_of(tree)) is not None:
        for _, item in kind.items(tree):
            yield from tensors_in(item)


def insert_tensors(tree: Any, tensor: Callable[[str], torch.Tensor], *, is_live: bool = True) -> Any:
    """Return an extracted and fitted tree with its tensors inserted again; the reverse of `Extraction`.

    If it is not for live objects, a composite tensor of a class of the program stays a `SavedTensor`.
    """
    if type(tree) is TensorRef:
        return tensor(tree.name)
    kind = containers.kind_of(tree)
    if kind is None:
        return tree
    pairs = [(step, insert_tensors(item, tensor, is_live=is_live)) for step, item in kind.items(tree)]
    new = kind.rebuild(tree, pairs)
    if type(new) is not SavedTensor:
        return new
    made = put_together(new)
    if is_live and type(made) is SavedTensor:
        raise InvalidInput(
            f"A tensor was saved as a {made.type.replace(':', '.')}, which is only restored into a live "
            "tensor of this class. The state may be partly restored. Put such a tensor in its place "
            "before the restore."
        )
    return made
