"""Nested dicts and lists with tensors in them <-> tensors by name and values by top-level key."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidInput, NotFound
from holdfast.exchange.selection import is_under
from holdfast.format.values import TensorRef

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Gathered:
    """The tensors of a tree by name, which names show another one's memory, and what is left."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def gather(tree: Mapping[str, Any]) -> Gathered:
    """Take a tree apart: a tensor's name is its path, joined by dots.

    Raises:
        InvalidInput: two tensors with one name, or an object that is neither tensor nor plain value.
        Unsupported: a tensor that no checkpoint can hold.
    """
    from holdfast.state.tensors import is_savable, refuse
    from holdfast.state.tree import strip

    found = Gathered()
    shown: dict[object, str] = {}  # what a tensor shows of memory -> name

    def emit(name: str, tensor: torch.Tensor) -> None:
        if name in found.tensors or name in found.tied:
            message = f"Two tensors of the source would be called {name!r}; rename a key before the import."
            raise InvalidInput(message, key=name)
        if not is_savable(tensor):
            raise refuse(tensor, name)
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = shown.setdefault(view, name) if tensor.numel() else name
        if first == name:
            found.tensors[name] = tensor
        else:
            found.tied[name] = first

    for key, item in tree.items():
        try:
            stripped = strip(item, key, emit)
        except RecursionError as error:
            message = f"What is under {key[:60]!r} contains itself, or is nested too deeply."
            raise InvalidInput(message, key=key[:60]) from error
        if not is_told_by_names(key, stripped):
            found.values[key] = {} if is_state_dict(key, stripped) else stripped
    return found


def is_told_by_names(key: str, tree: Any) -> bool:
    """True for a top-level tensor: its name says all there is to say."""
    return isinstance(tree, TensorRef) and tree.name == key


def is_state_dict(key: str, tree: Any) -> bool:
    """True for a dict of nothing but tensors under their own names: that it is a dict says the rest."""
    if type(tree) not in (dict, collections.OrderedDict):
        return False
    return all(
        isinstance(name, str) and isinstance(item, TensorRef) and item.name == f"{key}.{name}"
        for name, item in tree.items()
    )


def assemble(
    names: Iterable[str], values: Mapping[str, Any], tensor: Callable[[str], Any], only: Iterable[str] | None
) -> dict[str, Any]:
    """Put a tree together again, or make one of a training run's checkpoint.

    A tensor that no value refers to stands under the longest top-level key that its name begins with, under
    the rest of its name: `model` is then what `model.load_state_dict` takes. An optimizer's state is by
    parameter, as torch's `set_optimizer_state_dict` takes it.

    Args:
        names: of all tensors that are taken.
        values: by top-level key, with a `TensorRef` where a tensor is.
        tensor: what stands for a tensor, by name.
        only: prefixes of what is taken; None for all.
    """
    taken = list(names)
    prefixes = None if only is None else list(only)
    kept = {
        key: value
        for key, value in values.items()
        if prefixes is None or any(is_under(key, p) or is_under(p, key) for p in prefixes)
    }
    used: set[str] = set()
    tree = {key: _graft(value, set(taken), tensor, used) for key, value in kept.items()}
    if prefixes is not None:
        tree = {key: value for key, value in tree.items() if value is not _GONE}
    for name in taken:
        if name not in used:
            _hang(tree, name, tensor(name))
    return tree


def prune(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Values without what refers to a tensor that is not among `names`."""
    held = set(names)
    pruned = {key: _graft(value, held, TensorRef, set()) for key, value in values.items()}
    return {key: value for key, value in pruned.items() if value is not _GONE}


_GONE = object()
_MAX_INT_BITS = 2000  # torch reads integers of up to 255 bytes


def _graft(value: Any, names: set[str], tensor: Callable[[str], Any], used: set[str]) -> Any:
    """A tree with tensors in their places; what refers to a tensor that is not taken is left out."""
    if isinstance(value, TensorRef):
        if value.name not in names:
            return _GONE
        used.add(value.name)
        return tensor(value.name)
    if isinstance(value, dict):
        items = ((key, _graft(item, names, tensor, used)) for key, item in value.items())
        pairs = [(key, item) for key, item in items if item is not _GONE]
        return collections.OrderedDict(pairs) if isinstance(value, collections.OrderedDict) else dict(pairs)
    if isinstance(value, (list, tuple, collections.deque)):
        items = [item for one in value if (item := _graft(one, names, tensor, used)) is not _GONE]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _hang(tree: dict[str, Any], name: str, tensor: Any) -> None:
    """Put a tensor where its name says."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        key, rest = ".".join(parts[:length]), ".".join(parts[length:])
        held = tree.get(key)
        if not isinstance(held, dict):
            continue
        fqn, dot, slot = rest.removeprefix("state.").rpartition(".")
        if rest.startswith("state.") and dot and fqn in _parameters(held):
            held.setdefault("state", {}).setdefault(fqn, {})[slot] = tensor
        else:
            held[rest] = tensor
        return
    tree[name] = tensor


def _parameters(held: dict[str, Any]) -> set[str]:
    """Names of the parameters of an optimizer's tree; none if it is no such tree."""
    groups = held.get("param_groups")
    if not isinstance(groups, list):
        return set()
    return {name for group in groups if isinstance(group, dict) for name in group.get("params", ())}


def rename_top(tree: dict[str, Any], prefixes: Mapping[str, str] | None) -> dict[str, Any]:
    """A tree whose top-level keys are called otherwise; "" puts what a key holds at the top.

    Raises:
        NotFound: no such top-level key.
        InvalidInput: two keys become one, or what is to stand at the top is no dict.
    """
    renamed: dict[str, Any] = {}
    for key in prefixes or {}:
        if key not in tree:
            shown = ", ".join(list(tree)[:10])
            raise NotFound(f"There is no top-level key {key!r} to be renamed; there are: {shown}.", key=key)
    for key, value in tree.items():
        new = (prefixes or {}).get(key, key)
        if not new and not isinstance(value, dict):
            raise InvalidInput(f"{key} is no dict, so it cannot stand at the top by itself.", key=key)
        for name, item in value.items() if not new else [(new, value)]:
            if name in renamed:
                raise InvalidInput(f"Two things would be called {name!r} at the top.", key=str(name))
            renamed[name] = item
    return renamed


def make_plain(value: Any, leave: type) -> Any:
    """A tree of nothing but what `torch.load(weights_only=True)` takes.

    Arrays become lists, paths and dates become texts, deques, sets and ranges become lists, integers of more
    than 2000 bits become texts; objects of the type `leave` stay.
    """
    if isinstance(value, leave):
        return value
    if isinstance(value, Mapping):
        kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return kind((make_plain(key, leave), make_plain(item, leave)) for key, item in value.items())
    if isinstance(value, tuple):
        return tuple(make_plain(item, leave) for item in value)
    if isinstance(value, (set, frozenset)):
        return sorted((make_plain(item, leave) for item in value), key=repr)
    if isinstance(value, (list, collections.deque, range)):
        return [make_plain(item, leave) for item in value]
    return _plain_leaf(value)


def _plain_leaf(value: Any) -> Any:
    if value is None or type(value) in (bool, float, str, complex, bytearray):
        return value
    if type(value) is int:
        return value if value.bit_length() <= _MAX_INT_BITS else str(value)
    if type(value) is bytes:
        return value or bytearray()  # torch knows no bytes without any in them
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if callable(getattr(value, "tolist", None)):  # numpy, which need not be there
        return value.tolist()
    return value if type(value).__module__ == "torch" else str(value)
