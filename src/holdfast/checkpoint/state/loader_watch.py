"""Watch over PyTorch's data loaders: notes each new iterator, and finds those that would not resume."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch

from holdfast.checkpoint.state.entry import is_follower, is_generator

_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()
_evaluation = threading.local()  # depth of `unwatched_loaders` in each thread
_watched: set[type] = set()  # base classes of iterators
_plain: set[type] = set()  # classes of iterators without a state of their own
_REPORTED = "_holdfast_has_reported"


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
        begin = base.__init__

        @functools.wraps(begin)
        def begin_noted(self: Any, *args: Any, **kwargs: Any) -> None:
            _note(self)
            begin(self, *args, **kwargs)

        base.__init__ = begin_noted  # PyTorch has no hook for new iterators
        kinds = loading._SingleProcessDataLoaderIter, loading._MultiProcessingDataLoaderIter
        _plain.update(kinds)
    for iterator in gc.get_referrers(*kinds):
        if type(iterator) in kinds:
            _note(iterator)


def plain_iterators() -> list[Any]:
    """Return the live iterators of data loaders that have no state of their own."""
    watch_loaders()  # torch's data loaders may have been imported since
    with _lock:
        return [one for one in _iterators if type(one) in _plain]


def num_returned(order: object) -> int | None:
    """Return how many batches a plain loader has returned that draws from an iterator; None without one."""
    return next((one._num_yielded for one in plain_iterators() if one._sampler_iter is order), None)


def batches_returned() -> frozenset[tuple[int, int]]:
    """Return a value that changes with each iterator and each batch that feeds the training."""
    with _lock:
        return frozenset((id(one), getattr(one, "_num_yielded", 0)) for one in _iterators)


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


def loader_doubts(values: Collection[Any]) -> Iterator[str]:
    """Yield a sentence for each data loader in mid-epoch that cannot be resumed; for each iterator once."""
    for iterator in plain_iterators():
        if not getattr(iterator, "_num_yielded", 0):  # it may be starting in another thread
            continue
        order = iterator._index_sampler  # of batches, or of single elements without batching
        with contextlib.suppress(TypeError):  # without a length
            # At its end it was an evaluation, or the next epoch draws its order from restored generators.
            if iterator._num_yielded >= len(order):
                continue
        if getattr(iterator, _REPORTED, False):
            continue
        data = type(iterator._dataset).__qualname__
        if is_follower(order):
            doubt = _follower_doubt(iterator, order, data, values)
        elif hasattr(order, "state_dict"):  # it can be added to the state, and then the order resumes
            doubt = None
        else:
            doubt = _order_doubt(order, data)
        if doubt is not None:
            setattr(iterator, _REPORTED, True)
            yield doubt


def _follower_doubt(iterator: Any, order: Any, data: str, values: Collection[Any]) -> str | None:
    if any(order is value for value in values):
        held = _own_generator(iterator._dataset) if iterator._num_workers else None
        return held and (
            f"a DataLoader over {data} has workers, and {held} is a generator of the data set: each worker "
            "has a copy, which starts anew when the run resumes. Draw from the functions of torch, "
            "numpy.random or random instead, which are seeded for each batch, or from a generator seeded by "
            "the sample's index."
        )
    kind = type(order).__qualname__
    return (
        f"a DataLoader over {data} is being read in the order of a {kind} that is not in the state, so a "
        "resumed run starts again from its first batch. Add it: state={..., 'batches': batches}."
    )


def _order_doubt(order: Any, data: str) -> str:
    sampler = getattr(order, "sampler", order)
    is_shuffled = isinstance(sampler, torch.utils.data.RandomSampler) or (
        hasattr(sampler, "generator") and sampler.generator is None
    )
    how = "shuffled " if is_shuffled else ""
    return (
        f"a {how}DataLoader over {data} is being read, and cannot be resumed: a resumed run starts it again, "
        "with different batches. If it feeds the training, use DataLoader(data, "
        "batch_sampler=holdfast.train.data.GlobalBatches(len(data), batch_size)) and add these batches to "
        'the state. If it is an evaluation, read it within `with ckpt.phase("eval"):`.'
    )


def _own_generator(dataset: Any) -> str | None:
    """Return the name of a generator that a data set or its transforms hold; None without one."""
    waiting, seen = [(type(dataset).__name__, dataset)], set[int]()
    while waiting and len(seen) < 100:
        path, part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if is_generator(part):
            return path
        for name, item in getattr(part, "__dict__", {}).items():
            items = item[:20] if isinstance(item, (list, tuple)) else [item]
            is_searched = (each for each in items if is_generator(each) or hasattr(each, "__dict__"))
            waiting += [(f"{path}.{name}", each) for each in is_searched]
    return None
