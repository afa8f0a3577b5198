"""Trees of values that contain tensors: tensors are extracted, matched with live ones, and inserted again."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.checkpoint.format.composites import DTENSOR, SavedTensor
from holdfast.checkpoint.format.limits import MAX_NAME_CHARS
from holdfast.checkpoint.format.values import EntryRef, TensorRef
from holdfast.checkpoint.state.composites import Composite, put_together, take_apart
from holdfast.checkpoint.state.containers import (
    FittedTensor,
    is_dataclass,
    is_named_tuple,
    kind_of,
    saved_container,
    saved_key,
    saved_leaf,
)
from holdfast.checkpoint.state.entry import is_entry
from holdfast.checkpoint.state.tensors import is_composite, is_sparse, unsavable
from holdfast.errors import InvalidInput, Unsupported

_LEAVES = frozenset({type(None), bool, int, float, str, bytes, TensorRef})
_PLAIN_KEYS = frozenset({type(None), bool, int, float, str, bytes})
_MAPPINGS = frozenset({dict, collections.OrderedDict})
_SEQUENCES = frozenset({list, tuple})

Emit = Callable[[str, torch.Tensor], object]


def extract_tensors(
    value: Any,
    name: str,
    emit: Emit,
    *,
    named_types: bool = False,
    entries: bool = False,
    composites: bool = True,
) -> Any:
    """Return a tree with a `TensorRef` for every tensor; `emit` receives each tensor with its name.

    Args:
        value: the tree.
        name: name of the tree; a tensor's name is this and its path, joined by dots.
        emit: called with each tensor's name and the tensor.
        named_types: replace values of the program's own types by their saved forms, see
            `holdfast.checkpoint.format.named_types`. Only for values that are restored into live ones.
        entries: replace objects that are entries of their own by an `EntryRef`.
        composites: replace composite tensors by a `SavedTensor`, and emit their inner tensors.

    Raises:
        Unsupported: a composite tensor cannot be saved.
        InvalidInput: a container holds an object with its own state_dict(), or a name is too long.
    """
    walk = _Extraction(emit, named_types=named_types, entries=entries, composites=composites)
    return walk.extract(value, name)


class _Extraction:
    """One walk over a tree, with the options of `extract_tensors`."""

    __slots__ = ("_composites", "_emit", "_entries", "_named_types")

    def __init__(
        self, emit: Emit, *, named_types: bool = True, entries: bool = False, composites: bool = True
    ) -> None:
        self._emit = emit
        self._named_types = named_types
        self._entries = entries
        self._composites = composites

    def extract(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return value
        if len(name) > MAX_NAME_CHARS:
            raise _too_long(name)
        if isinstance(value, torch.Tensor):
            if self._composites and is_composite(value):
                return self._composite(value, name)
            self._emit(name, value)
            return TensorRef(name)
        if kind in _MAPPINGS:
            return self._mapping(value, name)
        if kind in _SEQUENCES:
            return kind(self.extract(item, f"{name}.{i}") for i, item in enumerate(value))
        return EntryRef(name) if self._entries and is_entry(value) else self._other(value, name)

    def _composite(self, value: torch.Tensor, name: str) -> SavedTensor:
        try:
            one = take_apart(value)
        except Unsupported as error:
            raise unsavable(value, name, str(error)) from error
        walk = self
        if one.type == DTENSOR:
            per_rank = getattr(self._emit, "per_rank", None)
            if per_rank is None:
                raise unsavable(
                    value, name, "it is a DTensor over a tensor of another class. Save its to_local()."
                )
            walk = _Extraction(per_rank)
        inner = {part: walk.extract(item, f"{name}.{part}") for part, item in one.inner.items()}
        return SavedTensor(one.type, inner, facts_of(one, name))

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
            "state_dict() there in place of the object, such as in a subclass, and load it in "
            "load_state_dict()."
        )
    return InvalidInput(message, key=name)


def facts_of(one: Composite, name: str) -> dict[str, Any]:
    """Return the facts about a composite tensor in their saved forms, its context included.

    Raises:
        Unsupported: the context contains a tensor.
        InvalidInput: the context contains another value that cannot be saved.
    """
    if not one.has_context:
        return one.facts

    def refuse(path: str, tensor: torch.Tensor) -> None:
        raise unsavable(
            tensor,
            path,
            "it is in the context of a __tensor_flatten__(). Return its name among the tensors there.",
        )

    context = extract_tensors(one.context, f"{name}.<context>", refuse, named_types=True)
    return {**one.facts, "context": context}


def references(tree: Any) -> Iterator[str]:
    """Yield names of all tensors that an extracted tree refers to."""
    if isinstance(tree, TensorRef):
        yield tree.name
    elif (kind := kind_of(tree)) is not None:
        for _, item in kind.items(tree):
            if type(item) not in _PLAIN_KEYS:
                yield from references(item)


def insert_tensors(tree: Any, tensor: Callable[[str], torch.Tensor], *, is_live: bool = True) -> Any:
    """Return an extracted tree with its tensors inserted again; the reverse of `extract_tensors`.

    Args:
        tree: the tree, fitted to live values.
        tensor: returns the tensor with a name.
        is_live: the tree is for live objects. Otherwise a composite tensor of a class of the program stays a
            `SavedTensor` with its inner tensors.

    Raises:
        InvalidInput: there is no live tensor of the class of a composite one.
    """
    if type(tree) is TensorRef:
        return tensor(tree.name)
    kind = kind_of(tree)
    if kind is None:
        return tree
    items = [insert_tensors(item, tensor, is_live=is_live) for _, item in kind.items(tree)]
    new = kind.rebuild(tree, items)
    if type(new) is FittedTensor:
        return put_together(new.saved, new.live)
    if type(new) is not SavedTensor:
        return new
    made = put_together(new, None)
    if is_live and type(made) is SavedTensor:
        raise InvalidInput(
            f"A tensor was saved as a {made.type.replace(':', '.')}, which is only restored into a live "
            "tensor of this class. The state may be partly restored. Put such a tensor in its place "
            "before the restore."
        )
    return made


def match_tensors(tree: Any, live: Any, claim: Callable[[str, torch.Tensor], bool]) -> Any:
    """Return an extracted tree with live tensors wherever `claim(name, live tensor)` accepts them.

    `tree` and `live` are walked together; a reference without a live counterpart stays.
    """
    if type(tree) is TensorRef:
        is_plain = isinstance(live, torch.Tensor) and not is_composite(live)
        return live if is_plain and claim(tree.name, live) else tree
    if type(tree) is FittedTensor:
        return _match_composite(tree, live, claim)
    kind = kind_of(tree)
    if kind is None or type(tree) is not type(live):
        return tree
    places = dict(kind.items(live))
    matched = [match_tensors(item, places.get(step), claim) for step, item in kind.items(tree)]
    return kind.rebuild(tree, matched)


def _match_composite(tree: FittedTensor, live: Any, claim: Callable[[str, torch.Tensor], bool]) -> Any:
    """Return the live tensor, or the tree unless all inner tensors are claimed."""
    if live is not tree.live or is_sparse(live):
        return tree
    found = take_apart(live).inner
    saved = tree.saved
    inner = {name: match_tensors(item, found[name], claim) for name, item in saved.inner.items()}
    if all(inner[name] is found[name] for name in found):
        return live
    return FittedTensor(SavedTensor(saved.type, inner, saved.facts), live)
