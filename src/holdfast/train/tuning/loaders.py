"""Data loaders of a script: the one that feeds the steps, waiting times, and changed settings."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from holdfast.train.data.batches import Batches
from holdfast.train.tuning import source_lines
from holdfast.train.tuning.measurements import LoaderInfo, SourceLine

_POSITIONAL = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)


class LoaderSettings(Struct, frozen=True):
    """Changed settings for one data loader of the script."""

    index: int
    num_workers: int


class LoaderMonitor:
    """Monitor that patches the constructor and the iteration of all data loaders while it is running."""

    def __init__(self, settings: LoaderSettings | None = None) -> None:
        self.waited_s = 0.0
        self.num_loaded = 0
        self.num_started = 0
        """Number of iterations started: epochs."""
        self._settings = settings
        self._lines: list[SourceLine | None] = []
        self._last: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Monitor during the block. The source lines of loaders that exist already are unknown."""
        kinds: list[type] = [DataLoader]
        if importlib.util.find_spec("torchdata") is not None:
            from torchdata.stateful_dataloader import StatefulDataLoader

            kinds.append(StatefulDataLoader)
        with contextlib.ExitStack() as undo:
            for kind in kinds:
                for name, make in (("__init__", self._making), ("__iter__", self._iterating)):
                    own, before = name in vars(kind), getattr(kind, name)
                    undone = partial(setattr, kind, name, before) if own else partial(delattr, kind, name)
                    undo.callback(undone)
                    setattr(kind, name, make(before))
            yield

    def pop_waited(self) -> tuple[float, int]:
        """Return the seconds waited and the samples loaded since the last call."""
        waited = self.waited_s, self.num_loaded
        self.waited_s, self.num_loaded = 0.0, 0
        return waited

    def last_loader(self) -> LoaderInfo | None:
        """Return the loader of the newest batch, or None."""
        loader = self._last
        if loader is None:
            return None
        index, kind = getattr(loader, "_holdfast_index", -1), type(loader.dataset)
        is_iterable = issubclass(kind, IterableDataset)
        read = getattr(kind, "__iter__" if is_iterable else "__getitem__", None)
        return LoaderInfo(
            index=index,
            place=self._lines[index] if index >= 0 else None,
            sample_code=source_lines.function_line(loader.collate_fn) or source_lines.function_line(read),
            num_workers=loader.num_workers,
            is_iterable=is_iterable,
        )

    def _making(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def making(loader: Any, *args: Any, **kwargs: Any) -> None:
            if not hasattr(loader, "_holdfast_index"):  # otherwise a subclass calls its parent's constructor
                object.__setattr__(loader, "_holdfast_index", len(self._lines))
                self._lines.append(source_lines.current_line())
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
        kwargs["num_workers"] = settings.num_workers
        if not settings.num_workers:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
                kwargs.pop(name, None)
        return (dataset,), kwargs

    def _iterating(self, before: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Any]:
        @functools.wraps(before)
        def iterating(loader: Any) -> Any:
            self.num_started += 1
            started_s = time.perf_counter()
            iterator = before(loader)
            self.waited_s += time.perf_counter() - started_s
            return iterator if isinstance(iterator, _Timed) else _Timed(iterator, loader, self)

        return iterating


class _Timed:
    """Iterator of a loader that records the caller's waiting time. It delegates everything else."""

    def __init__(self, iterator: Iterator[Any], loader: Any, monitor: LoaderMonitor) -> None:
        self._iterator, self._loader, self._monitor = iterator, loader, monitor

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        started_s = time.perf_counter()
        batch = next(self._iterator)
        self._monitor.waited_s += time.perf_counter() - started_s
        self._monitor._last = self._loader
        self._monitor.num_loaded += _batch_size(self._loader) or 0
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader. None if it is unknown."""
    if loader.batch_size is None and isinstance(loader.batch_sampler, (Batches, BatchSampler)):
        return loader.batch_sampler.batch_size
    return loader.batch_size
