"""Runs real training steps on batches of a size, and measures their peak memory and their time."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.errors import Unsupported
from holdfast.quantity import say_bytes
from holdfast.train.batch.holdings import Holdings, count_bytes
from holdfast.train.batch.sample import tensors_of

STEPS_OF_A_PROBE = 2  # the first makes what the optimizer keeps; the second has all of it


@final
class Prober:
    """Real steps, measured. Changes the state, as steps do: take a `Snapshot` before.

    Args:
        step: one whole training step on a batch.
        make: a batch of a size.
        holdings: what the step changes.
        device: where the model lies.
        limit_bytes: what may be taken there.
    """

    def __init__(
        self,
        step: Callable[[Any], object],
        make: Callable[[int], Any],
        holdings: Holdings,
        device: torch.device,
        limit_bytes: int,
    ) -> None:
        self._step, self._make, self._holdings = step, make, holdings
        self._device, self._limit_bytes = device, limit_bytes

    def has_room(self, expected_bytes: int) -> bool:
        """True if a step that takes so much at its peak could be tried.

        On a device that much is taken for a moment, so that a rank that lacks it finds out by itself, and not
        when others wait for it in a collective.
        """
        self._clear()
        if self._device.type != "cuda":
            return True
        wanted = expected_bytes - torch.cuda.memory_allocated(self._device)
        try:
            torch.empty(max(0, wanted), dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            self._clear()
        return True

    def peak(self, size: int) -> int | None:
        """Bytes at the peak of a step on `size` samples; None if there was not enough memory.

        On a device, memory that its allocator has reserved; on a host, memory of tensors.

        Raises:
            Unsupported: memory ran out in a step that other ranks are part of.

        Ranks: collective if the step is.
        """
        self._clear()
        with self._within_memory(size):
            if self._device.type == "cuda":
                return self._device_peak(size)
            return self._host_peak(size)
        return None

    def step_seconds(self, size: int, rounds: int) -> float | None:
        """Seconds of a step on `size` samples, the fastest of some; None if there was not enough memory.

        The fastest, for what makes others slower is not the batch's doing.

        Ranks: collective if the step is.
        """
        self._clear()
        with self._within_memory(size):
            batch = self._make(size)
            self._step(batch)
            return min(self._timed(batch) for _ in range(rounds))
        return None

    def _timed(self, batch: Any) -> float:
        self._synchronize()
        begun_s = time.perf_counter()
        self._step(batch)
        self._synchronize()
        return time.perf_counter() - begun_s

    def _device_peak(self, size: int) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        batch = self._make(size)
        for _ in range(STEPS_OF_A_PROBE):
            self._step(batch)
        self._synchronize()
        return torch.cuda.max_memory_reserved(self._device)

    def _host_peak(self, size: int) -> int:
        batch = self._make(size)
        held = [*self._holdings.all_tensors(), *tensors_of(batch)]
        held_bytes = count_bytes(held, self._device)
        del held
        with _silent_kineto(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            for _ in range(STEPS_OF_A_PROBE):
                self._step(batch)
        now = peak = 0
        events: Any = trace.profiler
        changes = [one for one in events.kineto_results.events() if one.name() == "[memory]"]
        for change in sorted(changes, key=lambda one: one.start_ns()):
            now += change.nbytes()
            peak = max(peak, now)
        return held_bytes + peak

    @contextlib.contextmanager
    def _within_memory(self, size: int) -> Iterator[None]:
        """Goes on after the block if memory runs out in it."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if self._holdings.has_collectives:
                raise Unsupported(
                    f"A batch of {size} ran out of memory ({say_bytes(self._limit_bytes)}) in the midst of a "
                    "step that other ranks are part of, which may be waiting now. The search cannot go on: "
                    "start again with a lower limit=, or with most= below this size."
                ) from error
        finally:
            self._clear()

    def _clear(self) -> None:
        for tensor in self._holdings.module_tensors():
            if tensor.is_leaf:
                tensor.grad = None
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(
        error
    )


@contextlib.contextmanager
def _silent_kineto() -> Iterator[None]:
    """The profiler's library writes lines to standard error unless told not to, by its environment alone."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]
