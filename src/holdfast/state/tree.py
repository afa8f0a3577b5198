"""Trees of values that contain tensors: tensors are extracted, inserted again, and updated in place."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.errors import InvalidInput
from holdfast.format.limits import MAX_NAME_CHARS
from holdfast.format.values import TensorRef

_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_MAPPINGS = frozenset({dict, collections.OrderedDict})
_SEQUENCES = frozenset({list, tuple})

Emit = Callable[[str, torch.Tensor], object]


def extract_tensors(value: Any, name: str, emit: Emit) -> Any:
    """Return a tree with a `TensorRef` for every tensor; `emit` receives each tensor with its name.

    Args:
        value: the tree.
        name: name of the tree; a tensor's name is this and its path, joined by dots.
        emit: called with each tensor's name and the tensor.

    Raises:
        InvalidInput: a container holds an object with its own state_dict(), or a name is too long.
    """
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
        emit(name, value)
        return TensorRef(name)
    if kind in _MAPPINGS:
        return kind((key, extract_tensors(item, f"{name}.{key}", emit)) for key, item in value.items())
    if kind in _SEQUENCES:
        return kind(extract_tensors(item, f"{name}.{i}", emit) for i, item in enumerate(value))
    if kind is collections.deque:
        items = (extract_tensors(item, f"{name}.{i}", emit) for i, item in enumerate(value))
        return collections.deque(items, maxlen=value.maxlen)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        raise InvalidInput(
            f"{name} is a {kind.__module__}.{kind.__qualname__} inside a container. Objects with "
            "state_dict() are only saved as entries of the state itself. Nothing was written. "
            "Add it to the state under its own key.",
            key=name,
        )
    return value


def references(tree: Any) -> Iterator[str]:
    """Yield names of all tensors that an extracted tree refers to."""
    if isinstance(tree, TensorRef):
        yield tree.name
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from references(item)
    elif isinstance(tree, (list, tuple, collections.deque)):
        for item in tree:
            yield from references(item)


def insert_tensors(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return an extracted tree with its tensors inserted again; the reverse of `extract_tensors`."""
    kind = type(tree)
    if kind is TensorRef:
        return tensor(tree.name)
    if kind in _MAPPINGS:
        return kind((key, insert_tensors(item, tensor)) for key, item in tree.items())
    if kind in _SEQUENCES:
        return kind(insert_tensors(item, tensor) for item in tree)
    if kind is collections.deque:
        return collections.deque((insert_tensors(item, tensor) for item in tree), maxlen=tree.maxlen)
    return tree


def match_tensors(tree: Any, live: Any, claim: Callable[[str, torch.Tensor], bool]) -> Any:
    """Return an extracted tree with live tensors wherever `claim(name, live tensor)` accepts them.

    `tree` and `live` are walked together; a reference without a live counterpart stays.
    """
    kind = type(tree)
    if kind is TensorRef:
        return live if isinstance(live, torch.Tensor) and claim(tree.name, live) else tree
    if kind is not type(live):
        return tree
    if kind in _MAPPINGS:
        return kind((key, match_tensors(item, live.get(key), claim)) for key, item in tree.items())
    if kind in _SEQUENCES or kind is collections.deque:
        met = [match_tensors(item, live[i] if i < len(live) else None, claim) for i, item in enumerate(tree)]
        return (
            collections.deque(met, maxlen=tree.maxlen) if isinstance(tree, collections.deque) else kind(met)
        )
    return tree


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
    if isinstance(live, (list, tuple, collections.deque)):
        return _update_sequence(live, new)
    if isinstance(live, set):
        live.clear()
        live.update(new)
        return live
    if isinstance(live, bytearray):
        live[:] = new
        return live
    return _update_array(live, new)


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
