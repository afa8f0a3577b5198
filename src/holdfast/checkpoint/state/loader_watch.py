"""Watch over PyTorch's data loaders: notes each new iterator, so that a save need not search for them."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()
_evaluation = threading.local()  # depth of `unwatched_loaders` in each thread
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
    for iterator in gc.get_referrers(*kinds):
        if type(iterator) in kinds:
            _note(iterator)


def plain_iterators() -> list[Any]:
    """Return the live iterators of data loaders that have no state of their own."""
    watch_loaders()  # torch's data loaders may have been imported since
    loading = sys.modules.get("torch.utils.data.dataloader")
    if loading is None:
        return []
    kinds = _kinds(loading)
    with _lock:
        return [one for one in _iterators if type(one) in kinds]


def num_returned(order: object) -> int | None:
    """Return how many batches a live iterator of a data loader has returned.

    Args:
        order: iterator that it draws its batches from. None is returned if no plain loader draws from it.
    """
    return next((one._num_yielded for one in plain_iterators() if one._sampler_iter is order), None)


def batches_returned() -> frozenset[tuple[int, int]]:
    """Return a value that changes with each iterator and each batch that feeds the training."""
    with _lock:
        return frozenset((id(one), getattr(one, "_num_yielded", 0)) for one in _iterators)


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


@contextlib.contextmanager
def unwatched_loaders() -> Iterator[None]:
    """Leave out iterators that this thread begins meanwhile: they do not feed the training."""
    _evaluation.depth = getattr(_evaluation, "depth", 0) + 1
    try:
        yield
    finally:
        _evaluation.depth -= 1


def _note(iterator: Any) -> None:
    if getattr(_evaluation, "depth", 0):
        return
    with _lock:
        _iterators.add(iterator)
