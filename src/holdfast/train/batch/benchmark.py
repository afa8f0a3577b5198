"""Measurements of real training steps: peak memory and time per batch size."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.errors import Unsupported
from holdfast.system.units import format_bytes
from holdfast.train.batch.estimate import tensors_of
from holdfast.train.batch.training_state import TrainingState, count_bytes

STEPS_PER_PROBE = 2  # the first creates the optimizer's state, the second includes it


@final
@dataclass(frozen=True, slots=True)
class StepBenchmark:
    """Benchmark of real steps. It changes the state, as steps do: take a `Snapshot` before."""

    step: Callable[[Any], object]  # one complete training step on a batch
    make_batch: Callable[[int], Any]
    training: TrainingState  # everything that the step changes
    device: torch.device
    limit_bytes: int  # memory that the steps may take there

    def can_allocate(self, expected_bytes: int) -> bool:
        """Return True if a step with this peak may be tried.

        On a GPU the memory is allocated for a moment. A rank without enough memory then fails here and not in
        the middle of a collective, where the others would wait for it.
        """
        self._clear()
        if self.device.type != "cuda":
            return True
        wanted = expected_bytes - torch.cuda.memory_allocated(self.device)
        try:
            torch.empty(max(0, wanted), dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            self._clear()
        return True

    def measure_peak(self, size: int) -> int | None:
        """Return the peak bytes of a step on `size` samples. None if memory ran out.

        On a GPU these are bytes that the allocator reserved, on a host bytes of tensors.

        Ranks: collective if the step is.
        """
        self._clear()
        with self._within_memory(size):
            if self.device.type == "cuda":
                return self._device_peak(size)
            return self._host_peak(size)
        return None

    def measure_step_s(self, size: int, num_steps: int) -> float | None:
        """Return the seconds of the fastest step on `size` samples. None if memory ran out.

        Slower steps are slow for reasons other than the batch.

        Ranks: collective if the step is.
        """
        self._clear()
        with self._within_memory(size):
            batch, times_s = self.make_batch(size), []
            self.step(batch)
            for _ in range(num_steps):
                self._synchronize()
                begun_s = time.perf_counter()
                self.step(batch)
                self._synchronize()
                times_s.append(time.perf_counter() - begun_s)
            return min(times_s)
        return None

    def _device_peak(self, size: int) -> int:
        torch.cuda.reset_peak_memory_stats(self.device)
        batch = self.make_batch(size)
        for _ in range(STEPS_PER_PROBE):
            self.step(batch)
        self._synchronize()
        return torch.cuda.max_memory_reserved(self.device)

    def _host_peak(self, size: int) -> int:
        batch = self.make_batch(size)
        tensors = [*self.training.all_tensors(), *tensors_of(batch)]
        base_bytes = count_bytes(tensors, self.device)
        del tensors
        with _silent_kineto(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            for _ in range(STEPS_PER_PROBE):
                self.step(batch)
        now = peak = 0
        events: Any = trace.profiler
        changes = [one for one in events.kineto_results.events() if one.name() == "[memory]"]
        for change in sorted(changes, key=lambda one: one.start_ns()):
            now += change.nbytes()
            peak = max(peak, now)
        return base_bytes + peak

    @contextlib.contextmanager
    def _within_memory(self, size: int) -> Iterator[None]:
        """Suppress out-of-memory errors of the block."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            is_known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
            if not is_known and "DefaultCPUAllocator" not in str(error):
                raise
            if self.training.has_collectives:
                raise Unsupported(
                    f"A batch of {size} ran out of memory ({format_bytes(self.limit_bytes)}) during a step "
                    "that communicates with other ranks, which may be waiting now. fit_batch() cannot "
                    "continue: start again with a lower memory_limit=, or with max_size= below this size."
                ) from error
        finally:
            self._clear()

    def _clear(self) -> None:
        for tensor in self.training.module_tensors():
            if tensor.is_leaf:
                tensor.grad = None
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _silent_kineto() -> Iterator[None]:
    """Silence the profiler's library during the block. Only an environment variable can do that."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]
