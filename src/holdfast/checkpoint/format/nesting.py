"""Nesting of a checkpoint's content, for readers without the program: plain values by key path; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from holdfast.checkpoint.format.composites import UNDER, SavedTensor, composite_items
from holdfast.checkpoint.format.containers import kind_of
from holdfast.checkpoint.format.values import EntryRef, SavedEnum, TensorRef

_GONE = object()  # in place of a reference that is left out or leads nowhere


def is_under(name: str, prefix: str) -> bool:
    """Return True if a name is `prefix` or below it: "a.b" and "a.b.c" are under "a.b", "a.bc" is not."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def unflatten(
    names: Iterable[str], values: Mapping[str, Any], tensor: Callable[[str], Any]
) -> dict[str, Any]:
    """Rebuild a tree, or make one of a training run's checkpoint.

    A tensor that no value refers to is put under the longest top-level key that its name begins with, by
    the rest of its name, so `model.load_state_dict` accepts the item `model`. An optimizer's state is by
    parameter, as `set_optimizer_state_dict` of torch expects it. Values of the program's own types have
    their plain forms, and objects in containers are in their places.

    `values` are by top-level key, with a `TensorRef` in place of each tensor; `tensor` returns the
    replacement for one of the `names`.
    """
    chosen, used = list(names), set[str]()
    filled = {key: _fill(plain_form(value), set(chosen), tensor, used) for key, value in values.items()}
    tree = {key: value for key, value in filled.items() if value is not _GONE}
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
    if not isinstance(value, TensorRef):
        return change_items(value, lambda item, _: _fill(item, names, tensor, used))
    if value.name not in names:
        return _GONE
    used.add(value.name)
    return tensor(value.name)


def change_items(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return a container with `change(item, key path)` in place of each item; another value as it is."""
    kind = kind_of(value)
    if kind is None:
        return value
    pairs = [(step, change(item, f"{path}.{step}")) for step, item in kind.items(value)]
    return kind.rebuild(value, [(step, item) for step, item in pairs if item is not _GONE])


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


def plain_form(value: Any) -> Any:
    """Return a decoded value without types of the program.

    A dataclass or a namespace becomes a dict of its fields, a named tuple a tuple, a deque a list, an enum
    member its name, and a defaultdict a dict. A composite tensor becomes a dict of its inner tensors, with
    its type and facts.
    """
    if isinstance(value, SavedTensor):
        value = composite_items(value)
    elif isinstance(value, SavedEnum):
        return value.name
    elif type(value) in (set, frozenset):
        return type(value)(map(plain_form, value))
    elif isinstance(value, dict):
        value = placed_composites(value)
    kind = kind_of(value)
    if kind is None:
        return value
    return kind.plain([(plain_form(step), plain_form(item)) for step, item in kind.items(value)])


def composites(tree: Any, path: str) -> Iterator[tuple[str, SavedTensor]]:
    """Yield key path and description of each composite tensor in decoded values, outer ones first."""
    if isinstance(tree, SavedTensor):
        yield path, tree
    kind = kind_of(tree)
    for step, item in () if kind is None else kind.items(tree):
        yield from composites(item, path if step == UNDER else f"{path}.{step}")


def placed_composites(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return a module's values with each composite tensor under its own name; another dict as it is."""
    under = value.get(UNDER)
    if not isinstance(under, dict):
        return value
    return {**{key: item for key, item in value.items() if key != UNDER}, **under}


def place_entries(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of plain forms with each object in place of its `EntryRef`, not under its key path."""
    waiting = dict(tree)

    def place(value: Any, path: str) -> Any:
        if not isinstance(value, EntryRef):
            return change_items(value, place, path)
        # An object's key is the path of its place. So no document can put one into itself.
        found = waiting.pop(path, _GONE) if value.key == path else _GONE
        return _GONE if isinstance(found, EntryRef) else found

    placed = {key: place(value, key) for key, value in tree.items()}
    return {key: value for key, value in placed.items() if key in waiting}
