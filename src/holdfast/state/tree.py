"""Trees of values that contain tensors: tensors are extracted, inserted again, and updated in place."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.errors import InvalidInput
from holdfast.format.limits import MAX_NAME_CHARS
from holdfast.format.values import EntryRef, TensorRef
from holdfast.state.containers import (
    is_dataclass,
    is_frozen,
    is_named_tuple,
    kind_of,
    new_dataclass,
    set_fields,
)
from holdfast.state.entry_kinds import is_entry
from holdfast.state.saved_forms import saved_container, saved_key, saved_leaf

_LEAVES = frozenset({type(None), bool, int, float, str, bytes, TensorRef})
_PLAIN_KEYS = frozenset({type(None), bool, int, float, str, bytes})
_MAPPINGS = frozenset({dict, collections.OrderedDict})
_SEQUENCES = frozenset({list, tuple})

Emit = Callable[[str, torch.Tensor], object]


def extract_tensors(
    value: Any, name: str, emit: Emit, *, named_types: bool = False, entries: bool = False
) -> Any:
    """Return a tree with a `TensorRef` for every tensor; `emit` receives each tensor with its name.

    Args:
        value: the tree.
        name: name of the tree; a tensor's name is this and its path, joined by dots.
        emit: called with each tensor's name and the tensor.
        named_types: replace values of the program's own types by their saved forms, see
            `holdfast.format.named_types`. Only for values that are restored into live ones.
        entries: replace objects that are entries of their own by an `EntryRef`.

    Raises:
        InvalidInput: a container holds an object with its own state_dict(), or a name is too long.
    """
    return _Extraction(emit, named_types=named_types, entries=entries).extract(value, name)


class _Extraction:
    """One walk over a tree, with the options of `extract_tensors`."""

    __slots__ = ("_emit", "_entries", "_named_types")

    def __init__(self, emit: Emit, *, named_types: bool, entries: bool) -> None:
        self._emit = emit
        self._named_types = named_types
        self._entries = entries

    def extract(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return value
        if len(name) > MAX_NAME_CHARS:
            raise _too_long(name)
        if isinstance(value, torch.Tensor):
            self._emit(name, value)
            return TensorRef(name)
        if kind in _MAPPINGS:
            return self._mapping(value, name)
        if kind in _SEQUENCES:
            return kind(self.extract(item, f"{name}.{i}") for i, item in enumerate(value))
        return EntryRef(name) if self._entries and is_entry(value) else self._other(value, name)

    def _mapping(self, value: dict[Any, Any], name: str) -> Any:
        items = ((key, self.extract(item, f"{name}.{key}")) for key, item in value.items())
        if self._named_types and not _PLAIN_KEYS.issuperset(map(type, value)):
            items = ((saved_key(key), item) for key, item in items)
        return type(value)(items)

    def _other(self, value: Any, name: str) -> Any:
        if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            raise _misplaced(value, name, may_be_entry=self._entries)
        if self._named_types:
            value = saved_container(value, name)
        elif is_named_tuple(value) or is_dataclass(value):
            return value
        container = kind_of(value)
        if container is None:
            return saved_leaf(value, name) if self._named_types else value
        items = [self.extract(item, f"{name}.{step}") for step, item in container.items(value)]
        return container.rebuild(value, items)


def _too_long(name: str) -> InvalidInput:
    message = (
        f"The path {name[:60]}... has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed. "
        "Nothing was written. Use shorter keys."
    )
    return InvalidInput(message, key=name[:60])


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
            "state_dict() there, or add it to the state under its own key."
        )
    return InvalidInput(message, key=name)


def references(tree: Any) -> Iterator[str]:
    """Yield names of all tensors that an extracted tree refers to."""
    if isinstance(tree, TensorRef):
        yield tree.name
    elif (kind := kind_of(tree)) is not None:
        for _, item in kind.items(tree):
            if type(item) not in _PLAIN_KEYS:
                yield from references(item)


def insert_tensors(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return an extracted tree with its tensors inserted again; the reverse of `extract_tensors`."""
    if type(tree) is TensorRef:
        return tensor(tree.name)
    kind = kind_of(tree)
    if kind is None:
        return tree
    return kind.rebuild(tree, [insert_tensors(item, tensor) for _, item in kind.items(tree)])


def match_tensors(tree: Any, live: Any, claim: Callable[[str, torch.Tensor], bool]) -> Any:
    """Return an extracted tree with live tensors wherever `claim(name, live tensor)` accepts them.

    `tree` and `live` are walked together; a reference without a live counterpart stays.
    """
    if type(tree) is TensorRef:
        return live if isinstance(live, torch.Tensor) and claim(tree.name, live) else tree
    kind = kind_of(tree)
    if kind is None or type(tree) is not type(live):
        return tree
    places = dict(kind.items(live))
    matched = [match_tensors(item, places.get(step), claim) for step, item in kind.items(tree)]
    return kind.rebuild(tree, matched)


def update_in_place(live: Any, new: Any) -> Any:
    """Make a live container equal to a new one, in place where types agree.

    Returns:
        The value to use from now on: `live` itself if it could be changed in place, else `new`.
    """
    if live is new or type(live) is not type(new):
        return new
    if isinstance(live, dict):
        merged = {key: update_in_place(live[key], item) if key in live else item for key, item in new.items()}
        live.clear()
        live.update(merged)
        return live
    if is_named_tuple(live) or is_dataclass(live):
        return _update_fields(live, new)
    if isinstance(live, (list, tuple, collections.deque)):
        return _update_sequence(live, new)
    if isinstance(live, set):
        live.clear()
        live.update(new)
        return live
    if isinstance(live, bytearray):
        live[:] = new
        return live
    if kind_of(live) is not None:  # a namespace
        update_in_place(vars(live), vars(new))
        return live
    return _update_array(live, new)


def _update_fields(live: Any, new: Any) -> Any:
    """Update what can be changed in a named tuple or a dataclass; return it, or a new one in its place."""
    kind = kind_of(live)
    assert kind is not None
    places = dict(kind.items(live))
    merged = {name: update_in_place(places.get(name), item) for name, item in kind.items(new)}
    if merged.keys() == places.keys() and all(merged[name] is places[name] for name in merged):
        return live
    if is_named_tuple(live):
        return kind.rebuild(live, list(merged.values()))
    return new_dataclass(type(live), merged) if is_frozen(live) else set_fields(live, merged)


def _update_sequence(live: Any, new: Any) -> Any:
    merged = [update_in_place(live[i], item) if i < len(live) else item for i, item in enumerate(new)]
    if isinstance(live, tuple):
        return type(live)(merged)
    if isinstance(live, collections.deque) and live.maxlen != new.maxlen:
        return new
    live.clear()
    live.extend(merged)
    return live


def _update_array(live: Any, new: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(live, numpy.ndarray):
        return new
    if live.shape != new.shape or live.dtype != new.dtype or not live.flags.writeable:
        return new
    live[...] = new
    return live
