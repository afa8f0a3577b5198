"""Trees of values with tensors in them: take the tensors out, put them back, update in place."""

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


def strip(value: Any, name: str, emit: Emit) -> Any:
    """A tree with every tensor replaced by a `TensorRef`; `emit` gets each tensor with its name.

    Args:
        name: name of the tree; a tensor's name is this and its path, joined by dots.

    Raises:
        InvalidInput: an object with its own state_dict() inside a container, or a name that is too long.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if len(name) > MAX_NAME_CHARS:
        message = (
            f"The path {name[:60]}... has {len(name)} characters, and at most {MAX_NAME_CHARS} can be saved. "
            "Nothing was written. Use shorter keys."
        )
        raise InvalidInput(message, key=name[:60])
    if isinstance(value, torch.Tensor):
        emit(name, value)
        return TensorRef(name)
    if kind in _MAPPINGS:
        return kind((key, strip(item, f"{name}.{key}", emit)) for key, item in value.items())
    if kind in _SEQUENCES:
        return kind(strip(item, f"{name}.{i}", emit) for i, item in enumerate(value))
    if kind is collections.deque:
        items = (strip(item, f"{name}.{i}", emit) for i, item in enumerate(value))
        return collections.deque(items, maxlen=value.maxlen)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        message = (
            f"{name} is a {kind.__module__}.{kind.__qualname__} inside a container; objects with "
            "state_dict() are only saved as entries of the state itself. Nothing was written. "
            "Give it a key of its own."
        )
        raise InvalidInput(message, key=name)
    return value


def references(tree: Any) -> Iterator[str]:
    """Names of all tensors that a stripped tree refers to."""
    if isinstance(tree, TensorRef):
        yield tree.name
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from references(item)
    elif isinstance(tree, (list, tuple, collections.deque)):
        for item in tree:
            yield from references(item)


def graft(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """A stripped tree with its tensors back in their places; the reverse of `strip`."""
    kind = type(tree)
    if kind is TensorRef:
        return tensor(tree.name)
    if kind in _MAPPINGS:
        return kind((key, graft(item, tensor)) for key, item in tree.items())
    if kind in _SEQUENCES:
        return kind(graft(item, tensor) for item in tree)
    if kind is collections.deque:
        return collections.deque((graft(item, tensor) for item in tree), maxlen=tree.maxlen)
    return tree


def meet(tree: Any, live: Any, claim: Callable[[str, torch.Tensor], bool]) -> Any:
    """A stripped tree in which live tensors stand where `claim(name, live tensor)` takes them.

    `tree` and `live` are walked together; what has no counterpart keeps its `TensorRef`.
    """
    kind = type(tree)
    if kind is TensorRef:
        return live if isinstance(live, torch.Tensor) and claim(tree.name, live) else tree
    if kind is not type(live):
        return tree
    if kind in _MAPPINGS:
        return kind((key, meet(item, live.get(key), claim)) for key, item in tree.items())
    if kind in _SEQUENCES or kind is collections.deque:
        met = [meet(item, live[i] if i < len(live) else None, claim) for i, item in enumerate(tree)]
        return (
            collections.deque(met, maxlen=tree.maxlen) if isinstance(tree, collections.deque) else kind(met)
        )
    return tree


def update(live: Any, new: Any) -> Any:
    """Make a live container equal to a new one, in place as deep as the two agree in type.

    Returns:
        What should stand where `live` stands: `live` itself if it could be changed in place, else `new`.
    """
    if live is new or type(live) is not type(new):
        return new
    if isinstance(live, dict):
        merged = {key: update(live[key], item) if key in live else item for key, item in new.items()}
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
    merged = [update(live[i], item) if i < len(live) else item for i, item in enumerate(new)]
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
