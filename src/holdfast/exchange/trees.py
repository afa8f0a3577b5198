"""Conversion between nested trees with tensors, and tensors by name with values by top-level key."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidInput, NotFound
from holdfast.exchange.prefixes import is_under
from holdfast.format.values import TensorRef

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class FlatTree:
    """Tensors of a tree by name, names of tied tensors, and the remaining values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def flatten(tree: Mapping[str, Any]) -> FlatTree:
    """Flatten a tree. The name of a tensor is its path, joined by dots.

    Raises:
        InvalidInput: two tensors have the same name, or an object is neither a tensor nor a plain value.
        Unsupported: a checkpoint cannot hold one of the tensors.
    """
    from holdfast.state.tensors import is_savable, unsavable
    from holdfast.state.tree import extract_tensors

    found = FlatTree()
    views: dict[object, str] = {}  # name by the memory that a tensor refers to

    def emit(name: str, tensor: torch.Tensor) -> None:
        if name in found.tensors or name in found.tied:
            raise InvalidInput(
                f"Two tensors of the source would be named {name!r}. Rename a key before the import.",
                key=name,
            )
        if not is_savable(tensor):
            raise unsavable(tensor, name)
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = views.setdefault(view, name) if tensor.numel() else name
        if first == name:
            found.tensors[name] = tensor
        else:
            found.tied[name] = first

    for key, item in tree.items():
        try:
            stripped = extract_tensors(item, key, emit)
        except RecursionError as error:
            raise InvalidInput(
                f"The value of {key[:60]!r} contains itself, or is nested too deeply.", key=key[:60]
            ) from error
        if not is_named_tensor(key, stripped):
            found.values[key] = {} if is_state_dict(key, stripped) else stripped
    return found


def is_named_tensor(key: str, tree: Any) -> bool:
    """Return True for a top-level tensor, which its name implies."""
    return isinstance(tree, TensorRef) and tree.name == key


def is_state_dict(key: str, tree: Any) -> bool:
    """Return True for a dict of tensors under their own names, which the names imply."""
    if type(tree) not in (dict, collections.OrderedDict):
        return False
    return all(
        isinstance(name, str) and isinstance(item, TensorRef) and item.name == f"{key}.{name}"
        for name, item in tree.items()
    )


def unflatten(
    names: Iterable[str], values: Mapping[str, Any], tensor: Callable[[str], Any], only: Iterable[str] | None
) -> dict[str, Any]:
    """Rebuild a tree, or make one of a training run's checkpoint.

    A tensor that no value refers to is put under the longest top-level key that its name begins with, by
    the rest of its name, so `model.load_state_dict` accepts the item `model`. An optimizer's state is by
    parameter, as `set_optimizer_state_dict` of torch expects it.

    Args:
        names: names of all selected tensors.
        values: values by top-level key, with a `TensorRef` in place of each tensor.
        tensor: returns the replacement for a tensor, by name.
        only: selected prefixes; None for all.
    """
    chosen = list(names)
    prefixes = None if only is None else list(only)
    kept = {
        key: value
        for key, value in values.items()
        if prefixes is None or any(is_under(key, p) or is_under(p, key) for p in prefixes)
    }
    used: set[str] = set()
    tree = {key: _fill(value, set(chosen), tensor, used) for key, value in kept.items()}
    if prefixes is not None:
        tree = {key: value for key, value in tree.items() if value is not _GONE}
    for name in chosen:
        if name not in used:
            _insert(tree, name, tensor(name))
    return tree


def prune(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return values without references to tensors that are not in `names`."""
    kept = set(names)
    pruned = {key: _fill(value, kept, TensorRef, set()) for key, value in values.items()}
    return {key: value for key, value in pruned.items() if value is not _GONE}


_GONE = object()
_MAX_INT_BITS = 2000  # torch reads integers of up to 255 bytes


def _fill(value: Any, names: set[str], tensor: Callable[[str], Any], used: set[str]) -> Any:
    """Return a tree with tensors in their places.

    References to tensors that are not in `names` are left out.
    """
    if isinstance(value, TensorRef):
        if value.name not in names:
            return _GONE
        used.add(value.name)
        return tensor(value.name)
    if isinstance(value, dict):
        items = ((key, _fill(item, names, tensor, used)) for key, item in value.items())
        pairs = [(key, item) for key, item in items if item is not _GONE]
        return collections.OrderedDict(pairs) if isinstance(value, collections.OrderedDict) else dict(pairs)
    if isinstance(value, (list, tuple, collections.deque)):
        items = [item for one in value if (item := _fill(one, names, tensor, used)) is not _GONE]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _insert(tree: dict[str, Any], name: str, tensor: Any) -> None:
    """Insert a tensor at the place that its name describes."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        key, rest = ".".join(parts[:length]), ".".join(parts[length:])
        parent = tree.get(key)
        if not isinstance(parent, dict):
            continue
        fqn, dot, slot = rest.removeprefix("state.").rpartition(".")
        if rest.startswith("state.") and dot and fqn in _parameters(parent):
            parent.setdefault("state", {}).setdefault(fqn, {})[slot] = tensor
        else:
            parent[rest] = tensor
        return
    tree[name] = tensor


def _parameters(optimizer: dict[str, Any]) -> set[str]:
    """Return the parameter names in an optimizer's dict, or an empty set for another dict."""
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list):
        return set()
    return {name for group in groups if isinstance(group, dict) for name in group.get("params", ())}


def rename_top_level(tree: dict[str, Any], prefixes: Mapping[str, str] | None) -> dict[str, Any]:
    """Rename top-level keys of a tree. "" moves a key's items to the top level.

    Raises:
        NotFound: a top-level key does not exist.
        InvalidInput: two keys become equal, or a value to move to the top level is not a dict.
    """
    renamed: dict[str, Any] = {}
    for key in prefixes or {}:
        if key not in tree:
            keys = ", ".join(list(tree)[:10])
            raise NotFound(
                f"The top-level key {key!r} to rename does not exist. The keys are: {keys}.", key=key
            )
    for key, value in tree.items():
        new = (prefixes or {}).get(key, key)
        if not new and not isinstance(value, dict):
            raise InvalidInput(f"{key} is not a dict, so its name cannot be removed.", key=key)
        for name, item in value.items() if not new else [(new, value)]:
            if name in renamed:
                raise InvalidInput(f"Two top-level keys would be named {name!r}.", key=str(name))
            renamed[name] = item
    return renamed


def make_plain(value: Any, keep: type) -> Any:
    """Convert a tree to values that `torch.load(weights_only=True)` accepts.

    Arrays, deques, sets and ranges become lists; paths, dates and integers of more than 2000 bits become
    strings. Objects of type `keep` are kept.
    """
    if isinstance(value, keep):
        return value
    if isinstance(value, Mapping):
        kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return kind((make_plain(key, keep), make_plain(item, keep)) for key, item in value.items())
    if isinstance(value, tuple):
        return tuple(make_plain(item, keep) for item in value)
    if isinstance(value, (set, frozenset)):
        return sorted((make_plain(item, keep) for item in value), key=repr)
    if isinstance(value, (list, collections.deque, range)):
        return [make_plain(item, keep) for item in value]
    return _plain_leaf(value)


def _plain_leaf(value: Any) -> Any:
    if value is None or type(value) in (bool, float, str, complex, bytearray):
        return value
    if type(value) is int:
        return value if value.bit_length() <= _MAX_INT_BITS else str(value)
    if type(value) is bytes:
        return value or bytearray()  # torch cannot load empty bytes
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if callable(getattr(value, "tolist", None)):  # numpy, which may not be installed
        return value.tolist()
    return value if type(value).__module__ == "torch" else str(value)
