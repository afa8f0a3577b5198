"""Nesting of a checkpoint's content: trees of values and tensors, rebuilt from their names; pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast.checkpoint.format.plain_forms import place_entries, plain_form
from holdfast.checkpoint.format.values import TensorRef

_GONE = object()  # in place of a reference that is left out


def is_under(name: str, prefix: str) -> bool:
    """Return True if a name is `prefix` or below it: "a.b" and "a.b.c" are under "a.b", "a.bc" is not."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def unflatten(
    names: Iterable[str], values: Mapping[str, Any], tensor: Callable[[str], Any], only: Iterable[str] | None
) -> dict[str, Any]:
    """Rebuild a tree, or make one of a training run's checkpoint.

    A tensor that no value refers to is put under the longest top-level key that its name begins with, by
    the rest of its name, so `model.load_state_dict` accepts the item `model`. An optimizer's state is by
    parameter, as `set_optimizer_state_dict` of torch expects it. Values of the program's own types have
    their plain forms, and objects in containers are in their places.

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
    tree = {key: _fill(plain_form(value), set(chosen), tensor, used) for key, value in kept.items()}
    if prefixes is not None:
        tree = {key: value for key, value in tree.items() if value is not _GONE}
    for name in chosen:
        if name not in used:
            insert(tree, name, tensor(name))
    return place_entries(tree)


def prune(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return values without references to tensors that are not in `names`."""
    kept = set(names)
    pruned = {key: _fill(value, kept, TensorRef, set()) for key, value in values.items()}
    return {key: value for key, value in pruned.items() if value is not _GONE}


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


def insert(tree: dict[str, Any], name: str, tensor: Any) -> None:
    """Insert a tensor at the place that its name describes; see `unflatten`."""
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


def is_optimizer(value: Any) -> bool:
    """Return True for the values of an optimizer: groups of parameters by name."""
    groups = value.get("param_groups") if isinstance(value, dict) else None
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )


def _parameters(optimizer: dict[str, Any]) -> set[str]:
    """Return the parameter names in an optimizer's dict, or an empty set for another dict."""
    if not is_optimizer(optimizer):
        return set()
    return {name for group in optimizer["param_groups"] for name in group["params"]}
