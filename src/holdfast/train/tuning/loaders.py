"""The data loaders of a script: which feeds the steps, how long the loop waits, and trial settings."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from holdfast.train.lengths.batches import Batches
from holdfast.train.tuning import places
from holdfast.train.tuning.facts import Loader, Place

_POSITIONAL = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Other settings for one data loader of the script; None leaves one as it is."""

    index: int
    num_workers: int | None = None
    batch_size: int | None = None


class Loaders:
    """Stands in for the constructor and the iteration of every data loader, until `stop`."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.waited_s = 0.0
        self.num_loaded = 0
        self.num_begun = 0
        """Iterations begun: epochs."""
        self._settings = settings
        self._places: list[Place | None] = []
        self._last: Any = None
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin; loaders that are there already are watched too, but have no place."""
        loaders: list[type] = [DataLoader]
        if importlib.util.find_spec("torchdata") is not None:
            from torchdata.stateful_dataloader import StatefulDataLoader

            loaders.append(StatefulDataLoader)
        for kind in loaders:
            self._replace(kind, "__init__", self._making)
            self._replace(kind, "__iter__", self._iterating)

    def stop(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def waited(self) -> tuple[float, int]:
        """Seconds that the loop has waited since the last call, and samples that it was given."""
        told = self.waited_s, self.num_loaded
        self.waited_s, self.num_loaded = 0.0, 0
        return told

    def last(self) -> Loader | None:
        """The loader that gave the newest batch."""
        loader = self._last
        if loader is None:
            return None
        index = getattr(loader, "_holdfast_index", -1)
        dataset, collate = loader.dataset, loader.collate_fn
        is_iterable = isinstance(dataset, IterableDataset)
        making = places.of_function(collate) or places.of_function(
            getattr(type(dataset), "__iter__" if is_iterable else "__getitem__", None)
        )
        return Loader(
            index=index,
            place=self._places[index] if index >= 0 else None,
            making=making,
            batch_size=_batch_size(loader),
            num_workers=loader.num_workers,
            is_iterable=is_iterable,
        )

    def _replace(self, kind: type, name: str, make: Callable[[Any], Any]) -> None:
        own = name in vars(kind)
        before = getattr(kind, name)
        setattr(kind, name, make(before))
        self._undo.append(lambda: setattr(kind, name, before) if own else delattr(kind, name))

    def _making(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def making(loader: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(loader, "_holdfast_index"):  # else a subclass calls the constructor above it
                object.__setattr__(loader, "_holdfast_index", len(self._places))
                self._places.append(places.here())
                args, kwargs = self._changed(loader._holdfast_index, args, kwargs)
            before(loader, *args, **kwargs)

        return making

    def _changed(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        settings = self._settings
        if settings is None or settings.index != index:
            return args, kwargs
        dataset, *others = args or (kwargs.pop("dataset"),)
        kwargs = {**dict(zip(_POSITIONAL, others, strict=False)), **kwargs}
        if settings.num_workers is not None:
            kwargs["num_workers"] = settings.num_workers
            if not settings.num_workers:
                for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                    kwargs.pop(name, None)
        if settings.batch_size is not None:
            sampler = kwargs.get("batch_sampler")
            if sampler is None:
                kwargs["batch_size"] = settings.batch_size
            elif isinstance(sampler, (Batches, BatchSampler)):
                sampler.batch_size = settings.batch_size
        return (dataset,), kwargs

    def _iterating(self, before: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Any]:
        @functools.wraps(before)
        def iterating(loader: Any) -> Any:
            self.num_begun += 1
            began_s = time.perf_counter()
            iterator = before(loader)
            self.waited_s += time.perf_counter() - began_s
            return iterator if isinstance(iterator, _Timed) else _Timed(iterator, loader, self)

        return iterating


class _Timed:
    """An iterator of a loader that tells how long its caller waits; all else is the iterator's own."""

    def __init__(self, iterator: Iterator[Any], loader: Any, told: Loaders) -> None:
        self._iterator, self._loader, self._told = iterator, loader, told

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        began_s = time.perf_counter()
        batch = next(self._iterator)
        self._told.waited_s += time.perf_counter() - began_s
        self._told._last = self._loader
        self._told.num_loaded += _batch_size(self._loader) or 0
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]


def _batch_size(loader: Any) -> int | None:
    """Samples in a batch of a loader; of all ranks where they are drawn together. None if nobody can tell."""
    if loader.batch_size is None and isinstance(loader.batch_sampler, (Batches, BatchSampler)):
        return loader.batch_sampler.batch_size
    return loader.batch_size
