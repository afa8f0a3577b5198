"""Watch over PyTorch's data loaders: notes each new iterator, so that a save need not search for them."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from typing import Any

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()
_watched: set[type] = set()  # base classes of iterators


def watch_loaders() -> None:
    """Note all existing iterators of data loaders, and every new one from now on.

    Blocks: once per process, for a scan of all its objects. It takes about 0.1 s with a million objects.
    """
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return
    base: Any = loading._BaseDataLoaderIter
    with _lock:
        if base in _watched:
            return
        _watched.add(base)
        _note_starts(base)
    kinds = _kinds(loading)
    for one in gc.get_referrers(*kinds):
        if type(one) in kinds:
            _note(one)


def plain_iterators() -> list[Any]:
    """Return the live iterators of data loaders that have no state of their own."""
    watch_loaders()  # torch's data loaders may have been imported since
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return []
    kinds = _kinds(loading)
    with _lock:
        return [one for one in _iterators if type(one) in kinds]


def _kinds(loading: Any) -> tuple[type, type]:
    return loading._SingleProcessDataLoaderIter, loading._MultiProcessingDataLoaderIter


def _note_starts(base: Any) -> None:
    """Have each new iterator noted. PyTorch has no hook for that."""
    begin = base.__init__

    @functools.wraps(begin)
    def begin_noted(self: Any, *args: Any, **kwargs: Any) -> None:
        _note(self)
        begin(self, *args, **kwargs)

    base.__init__ = begin_noted


def _note(iterator: Any) -> None:
    with _lock:
        _iterators.add(iterator)
