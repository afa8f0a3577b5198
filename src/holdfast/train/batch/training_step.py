"""Training step: its state, restored after trials, and its peak memory and time at a batch size."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, final

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree

from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.sharding import local_of
from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.units import format_bytes


class TrainingState(Struct, frozen=True):
    """Everything that a training step changes, by the way it is copied and restored."""

    modules: list[nn.Module]  # outermost modules
    optimizers: list[torch.optim.Optimizer]  # optimizers
    tensors: list[torch.Tensor]  # tensors outside of modules
    generators: list[torch.Generator]  # random number generators
    stateful: list[Any]  # other objects with `state_dict` and `load_state_dict`
    others: list[str]  # type names of all other objects

    @property
    def devices(self) -> set[torch.device]:
        """Devices of modules and tensors. Optimizers may keep counters elsewhere."""
        return {one.device for one in (*self.module_tensors(), *self.tensors)}

    @property
    def has_collectives(self) -> bool:
        """True if a forward or backward pass communicates with other ranks."""
        return any(
            isinstance(part, DistributedDataParallel)
            or any(isinstance(one, DTensor) for one in part.parameters(recurse=False))
            for part in self.parts()
        )

    @property
    def has_batch_norm(self) -> bool:
        """True if a module has batch norm, which needs several samples."""
        return any(isinstance(part, _BatchNorm) for part in self.parts())

    def reshard(self) -> None:
        """Have FSDP free the parameters that a forward pass gathered."""
        for part in self.parts():
            if isinstance(part, FSDPModule):
                part.reshard()

    def parts(self) -> Iterable[nn.Module]:
        """Return the modules and all their submodules, each once."""
        return {id(part): part for module in self.modules for part in module.modules()}.values()

    def module_tensors(self) -> Iterable[torch.Tensor]:
        """Return parameters and buffers, each once."""
        tensors = (one for module in self.modules for one in (*module.parameters(), *module.buffers()))
        return {id(tensor): tensor for tensor in tensors}.values()

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of every tensor that lives between two steps. Gradients do not."""
        yield from map(local_of, self.module_tensors())
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (local_of(one) for one in state.values() if isinstance(one, torch.Tensor))
        yield from self.tensors


def collect_training_state(state: Any) -> TrainingState:
    """Collect the training state from an object, or from mappings and sequences of objects."""
    found = TrainingState([], [], [], [], [], [])
    kinds: list[tuple[list[Any], type]] = [
        (found.modules, nn.Module),
        (found.optimizers, torch.optim.Optimizer),
        (found.tensors, torch.Tensor),
        (found.generators, torch.Generator),
    ]
    for value in _walk(state):
        known = next((values for values, kind in kinds if isinstance(value, kind)), None)
        if known is not None:
            known.append(value)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            found.stateful.append(value)
        else:
            found.others.append(type(value).__name__)
    return found


def count_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes that tensors take on a device. Shared memory counts once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in tensors
        if one.device == device
    }
    return sum(storages.values())


def _walk(state: Any) -> Iterator[Any]:
    if not isinstance(state, (Mapping, list, tuple)):
        yield state
        return
    for member in state.values() if isinstance(state, Mapping) else state:
        yield from _walk(member)


@contextlib.contextmanager
def restored(training: TrainingState) -> Iterator[None]:
    """Write the training state back into the same tensors after the block, bit for bit.

    The copy is in host memory, so it takes no memory of the device that is being measured.
    """
    training.reshard()
    restorers: list[Callable[[], object]] = []
    keep = restorers.append
    with torch.no_grad():
        for tensor in (*training.module_tensors(), *training.tensors):
            keep(_copier(tensor))
            if tensor.is_leaf:
                restorers += [] if tensor.grad is None else [_copier(tensor.grad)]
                keep(partial(setattr, tensor, "grad", tensor.grad))
        for part in training.parts():
            keep(partial(setattr, part, "training", part.training))
        restorers += map(_optimizer_restorer, training.optimizers)
    for generator in training.generators:
        keep(partial(generator.set_state, generator.get_state()))
    for stateful in training.stateful:
        keep(partial(stateful.load_state_dict, copy.deepcopy(stateful.state_dict())))
    keep(partial(rng.restore, rng.process_states()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        keep(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        training.reshard()
        with torch.no_grad():
            for restore in restorers:
                restore()


def _optimizer_restorer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's present groups and state."""
    groups = [
        {name: _frozen(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    states = {
        parameter: {name: _frozen(value) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }

    def restore() -> None:
        for group, was in zip(optimizer.param_groups, groups, strict=True):
            _refill(group, was, keeping="params")
        for parameter in [one for one in optimizer.state if one not in states]:
            del optimizer.state[parameter]
        for parameter, was in states.items():
            _refill(optimizer.state[parameter], was)

    return restore


def _refill(now: dict[str, Any], was: dict[str, Callable[[], Any]], *, keeping: str = "") -> None:
    """Make the members of a dict what they were, apart from one."""
    for name in now.keys() - was.keys() - {keeping}:
        del now[name]
    now.update({name: thaw() for name, thaw in was.items()})


def _copier(tensor: torch.Tensor) -> Callable[[], object]:
    """Return a function that fills `tensor` with its present contents."""
    copied = local_of(tensor).to("cpu", copy=True)
    return lambda: local_of(tensor).copy_(copied)


def _frozen(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now. A tensor stays the same object."""
    if not isinstance(value, torch.Tensor):
        copied = copy.deepcopy(value)
        return lambda: copied
    fill = _copier(value)

    def thaw() -> torch.Tensor:
        fill()
        return value

    return thaw


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
        """Suppress out-of-memory errors of the block, which begins and ends with all memory free."""
        self._clear()
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
