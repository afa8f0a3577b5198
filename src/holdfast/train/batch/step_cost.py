"""Cost of a training step at a batch size: its peak memory, estimated or measured, and its time."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from msgspec import Struct
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree

from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.units import format_bytes
from holdfast.train.batch.training_state import TrainingState, count_bytes


def batch_size_of(sample: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its tensors."""
    sizes = {leaf.shape[0] for leaf in tensors_of(sample) if leaf.dim() > 0}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInput(
            f"The sample batch's tensors have first dimensions of {sorted(sizes) or 'no length'}, so it "
            "cannot be cut or repeated to other sizes. Pass make_batch=, a function from a size to a batch."
        )
    return sizes.pop()


def resize(sample: Any, size: int) -> Any:
    """Return the batch with `size` samples: its first ones, or all of them repeated.

    Scalars and other objects are unchanged.
    """
    first = next(leaf for leaf in tensors_of(sample) if leaf.dim() > 0)
    index = torch.arange(size, device=first.device) % first.shape[0]

    def resized(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        return leaf.detach()[index.to(leaf.device)] if is_batched else leaf

    return _pytree.tree_map(resized, _plain(sample))


def tensors_of(sample: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch."""
    return [leaf for leaf in _pytree.tree_leaves(_plain(sample)) if isinstance(leaf, torch.Tensor)]


def _plain(sample: Any) -> Any:
    """Return a batch as a type that pytree supports. Tokenizers return mappings that it does not."""
    return dict(sample) if isinstance(sample, Mapping) and type(sample) is not dict else sample


def estimate_peak(
    step: Callable[[Any], object], make: Callable[[int], Any], training: TrainingState, size: int
) -> int:
    """Return the peak bytes of a step on a batch of `size`, without computing.

    Two steps run on fake tensors, which replace the modules' tensors and the optimizers' parameters for that
    time. Other effects of the step, such as scheduler steps and counters, are real.

    Source: torch.distributed._tools.MemTracker; equal to the profiler's real peak on CPU for GPT-2, BERT, T5.
    """
    devices = training.devices
    if training.has_collectives or len(devices) != 1:
        raise Unsupported(f"the step communicates with other ranks or uses {len(devices)} devices")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        # Compiling for fake tensors would be wasted.
        with torch.compiler.set_stance("force_eager"), _quiet(), _fakes_for(training, mode), mode:
            batch = make(size)
            tracker = MemTracker()
            tracker.track_external(*training.modules, *training.optimizers, *tensors_of(batch))
            with tracker:
                for _ in range(2):  # the second includes the optimizer's state
                    tracker.reset_mod_stats()
                    step(batch)
            snapshot = tracker.get_tracker_snapshot("peak")
    except Exception as error:
        text = str(error).strip().splitlines()
        raise Unsupported(f"{type(error).__name__}: {text[0] if text else ''}") from error
    (device,) = devices
    peak = sum(one["Total"] for place, one in snapshot.items() if place == device)
    return peak + count_bytes(training.tensors, device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of unsupported operators. The exception repeats it."""
    with contextlib.ExitStack() as undo:
        for name in ("torch._subclasses", "torch._subclasses.fake_tensor"):
            logger = logging.getLogger(name)
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield


@contextlib.contextmanager
def _fakes_for(training: TrainingState, mode: FakeTensorMode) -> Iterator[None]:
    """Replace parameters, buffers and the optimizers' parameters by fake tensors during the block."""
    fakes: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
        return fakes[id(tensor)]

    with contextlib.ExitStack() as undo:
        # Each part once: one that two modules share would get fake tensors of its fake tensors.
        both: Any = [slots for part in training.parts() for slots in (part._parameters, part._buffers)]
        for slots in both:
            for name, tensor in [(name, one) for name, one in slots.items() if one is not None]:
                undo.callback(slots.__setitem__, name, tensor)
                slots[name] = fake(tensor)
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                undo.callback(group.__setitem__, "params", group["params"])
                group["params"] = [fake(one) for one in group["params"]]
            undo.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.state = defaultdict(dict)
        yield


STEPS_PER_PROBE = 2  # the first creates the optimizer's state, the second includes it


@final
class StepBenchmark(Struct, frozen=True):
    """Benchmark of real steps. It changes the state, as steps do: use `restored`."""

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
            if self.device.type != "cuda":
                return self._host_peak(size)
            torch.cuda.reset_peak_memory_stats(self.device)
            batch = self.make_batch(size)
            for _ in range(STEPS_PER_PROBE):
                self.step(batch)
            self._synchronize()
            return torch.cuda.max_memory_reserved(self.device)
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
        for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
            now += event.nbytes() if event.name() == "[memory]" else 0
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
