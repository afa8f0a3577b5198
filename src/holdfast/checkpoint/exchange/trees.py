"""Conversion between nested trees and tensors by name, and selection and replacement of names."""

from __future__ import annotations

import collections
import datetime
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.format.nesting import is_under
from holdfast.checkpoint.format.values import TensorRef
from holdfast.errors import Corrupt, InvalidInput, NotFound

if TYPE_CHECKING:
    import torch


def select(names: Iterable[str], only: Iterable[str] | None, what: str) -> list[str]:
    """Return the names with any of the prefixes, in their order; all names if `only` is None."""
    every = list(names)
    if only is None:
        return every
    prefixes = list(only)
    for prefix in prefixes:
        if not any(is_under(name, prefix) for name in every):
            tops = ", ".join(list(dict.fromkeys(name.partition(".")[0] for name in every))[:10]) or "nothing"
            raise NotFound(f"{what} has no names under {prefix!r}. Its names begin with {tops}.", key=prefix)
    return [name for name in every if any(is_under(name, prefix) for prefix in prefixes)]


def touched_by(prefixes: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the top-level values that are under any of the prefixes, or contain it."""
    chosen = list(prefixes)
    return {k: v for k, v in values.items() if any(is_under(k, one) or is_under(one, k) for one in chosen)}


def rename(names: Iterable[str], prefixes: Mapping[str, str] | None) -> dict[str, str]:
    """Return new names with their old ones; the longest matching prefix is replaced, by "" with its dot."""
    prefixes = prefixes or {}
    by_length = sorted(prefixes, key=len, reverse=True)
    found: dict[str, str] = {}
    for name in names:
        prefix = next((old for old in by_length if is_under(name, old)), None)
        renamed = name
        if prefix is not None:
            new, rest = prefixes[prefix], name[len(prefix) :].removeprefix(".") if prefix else name
            renamed = f"{new}.{rest}" if new and rest else new or rest
        is_emptied = not renamed and renamed != name
        if is_emptied or renamed in found:
            clash = "a name cannot be empty" if is_emptied else f"{found[renamed]!r} gets that name too"
            raise InvalidInput(f"{name!r} would be renamed to {renamed!r}, but {clash}.", key=name)
        found[renamed] = name
    return found


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """Return the tensors of a tree by their paths, joined by dots; names of tied ones; other values."""
    from holdfast.checkpoint.state.tensors import is_savable, unsavable
    from holdfast.checkpoint.state.tree import Extraction

    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    values: dict[str, Any] = {}
    views: dict[object, str] = {}  # name by the memory that a tensor refers to

    def emit(name: str, tensor: torch.Tensor) -> None:
        if name in tensors or name in tied:
            raise InvalidInput(
                f"Two tensors of the source would be named {name!r}. Rename a key before the import.",
                key=name,
            )
        if not is_savable(tensor):
            raise unsavable(tensor, name)
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = views.setdefault(view, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor
        else:
            tied[name] = first

    for key, item in tree.items():
        try:
            values[key] = Extraction(emit).extract(item, key)
        except RecursionError as error:
            raise InvalidInput(
                f"The value of {key[:60]!r} contains itself, or is nested too deeply. Nothing was imported. "
                "Save a source without it.",
                key=key[:60],
            ) from error
    return tensors, tied, without_implied(values)


def without_implied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return top-level values without tensors, and items of dicts of tensors, that their names imply."""
    return {
        key: {} if _is_state_dict(key, tree) else tree
        for key, tree in values.items()
        if not (isinstance(tree, TensorRef) and tree.name == key)
    }


def _is_state_dict(key: str, tree: Any) -> bool:
    """Return True for a dict of tensors under their own names, which the names imply."""
    if type(tree) not in (dict, collections.OrderedDict):
        return False
    return all(
        isinstance(name, str) and isinstance(item, TensorRef) and item.name == f"{key}.{name}"
        for name, item in tree.items()
    )


def nest(flat: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Rebuild the tree that DCP flattened, from its leaves by path."""
    root: dict[Any, Any] = {}
    try:
        for (*parents, last), value in flat.items():
            node = root
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
    except (AttributeError, TypeError, ValueError) as error:
        raise Corrupt(f"The paths in the state do not form a tree: {error!r}. They are damaged.") from error
    return {str(key): _as_lists(value) for key, value in root.items()}


def _as_lists(node: Any) -> Any:
    """Convert dicts with numeric keys to the lists that DCP flattened; it makes other keys strings."""
    if type(node) not in (dict, collections.OrderedDict):
        return node
    if node and all(type(key) is int for key in node):
        return [_as_lists(node[key]) for key in sorted(node)]
    return {key: _as_lists(item) for key, item in node.items()}


_MAX_INT_BITS = 2000  # torch reads integers of up to 255 bytes


def rename_top_level(tree: dict[str, Any], prefixes: Mapping[str, str] | None) -> dict[str, Any]:
    """Rename top-level keys of a tree. "" moves a key's items to the top level."""
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
