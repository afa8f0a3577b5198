"""Updates of live containers and arrays with new values, in place where types agree."""

from __future__ import annotations

import collections
import sys
from typing import Any

import torch

from holdfast.checkpoint.state.containers import (
    is_dataclass,
    is_frozen,
    is_named_tuple,
    kind_of,
    new_dataclass,
    set_fields,
)
from holdfast.checkpoint.state.filled_memory import FilledMemory


class Updates:
    """The updates of one restore.

    A script may begin with one object in two places, as after `dict.fromkeys(names, [])`, and replace it
    later. So an object that is in two places has the new value of the first one. It stays in the second one
    too if the value there is equal. Otherwise the second place gets a value of its own.
    """

    def __init__(self) -> None:
        self._first: dict[int, tuple[Any, Any, Any]] = {}  # id of an object -> it, its new value, the result
        self._memory = FilledMemory()  # of arrays

    def update(self, live: Any, new: Any) -> Any:
        """Make a live value equal to a new one.

        Returns:
            The value to use from now on: `live` itself if it could be changed in place, else `new`.
        """
        if live is new or type(live) is not type(new):
            return new
        if isinstance(live, tuple):
            return (
                self._update_fields(live, new) if is_named_tuple(live) else self._update_sequence(live, new)
            )
        if not _is_changeable(live):
            return new
        if (first := self._first.get(id(live))) is not None:
            return first[2] if is_equal(first[1], new) else new
        changed = self._change(live, new)
        self._first[id(live)] = live, new, changed
        return changed

    def _change(self, live: Any, new: Any) -> Any:
        if isinstance(live, dict):
            merged = {key: self.update(live[key], item) if key in live else item for key, item in new.items()}
            live.clear()
            live.update(merged)
            return live
        if is_dataclass(live):
            return self._update_fields(live, new)
        if isinstance(live, (list, collections.deque)):
            return self._update_sequence(live, new)
        if isinstance(live, set):
            live.clear()
            live.update(new)
            return live
        if isinstance(live, bytearray):
            live[:] = new
            return live
        if kind_of(live) is not None:  # a namespace
            self.update(vars(live), vars(new))
            return live
        return self._update_array(live, new)

    def _update_fields(self, live: Any, new: Any) -> Any:
        """Update what can be changed in a named tuple or a dataclass; return it, or a new one."""
        kind = kind_of(live)
        assert kind is not None
        places = dict(kind.items(live))
        merged = {name: self.update(places.get(name), item) for name, item in kind.items(new)}
        if merged.keys() == places.keys() and all(merged[name] is places[name] for name in merged):
            return live
        if is_named_tuple(live):
            return kind.rebuild(live, list(merged.values()))
        return new_dataclass(type(live), merged) if is_frozen(live) else set_fields(live, merged)

    def _update_sequence(self, live: Any, new: Any) -> Any:
        merged = [self.update(live[i], item) if i < len(live) else item for i, item in enumerate(new)]
        if isinstance(live, tuple):
            return type(live)(merged)
        if isinstance(live, collections.deque) and live.maxlen != new.maxlen:
            return new
        live.clear()
        live.extend(merged)
        return live

    def _update_array(self, live: Any, new: Any) -> Any:
        if live.shape != new.shape or live.dtype != new.dtype or not live.flags.writeable:
            return new
        if live.flags.c_contiguous and live.nbytes:
            start = live.ctypes.data
            stop = start + live.nbytes
            for low, high in self._memory.overlap(start, stop):
                if live.tobytes()[low - start : high - start] != new.tobytes()[low - start : high - start]:
                    return new
            self._memory.add(start, stop)
        live[...] = new
        return live


def _is_changeable(value: Any) -> bool:
    if isinstance(value, (dict, list, collections.deque, set, bytearray)) or is_dataclass(value):
        return True
    numpy = sys.modules.get("numpy")
    return kind_of(value) is not None or (numpy is not None and isinstance(value, numpy.ndarray))


def is_equal(one: Any, other: Any) -> bool:
    """Return True if two new values are equal bit for bit, NaN included."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if (kind := kind_of(one)) is not None:
        return is_equal(dict(kind.items(one)), dict(kind.items(other)))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other) or (one != one and other != other)
