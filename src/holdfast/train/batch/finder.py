"""Search for a batch size: measure the memory of real steps, time them, and restore the state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
from msgspec import Struct

from holdfast.checkpoint.ranks import RankGroup, Ranks, values_of
from holdfast.errors import InvalidInput, RetryLater, Unsupported
from holdfast.system import host_memory
from holdfast.system.environment import read_integer
from holdfast.system.log import get_logger
from holdfast.system.units import format_bytes, parse_bytes, parse_duration, plural
from holdfast.train.batch import training_step
from holdfast.train.batch.result import BatchFit, Probe, choose_size, plan_accumulation, scaled_rates
from holdfast.train.batch.training_step import StepBenchmark, TrainingState

_PRECISION = 0.03
_STRAIGHT = 0.01
_LEAP = 4


@final
class Search:
    """Search for the largest size that fits, in few attempts. They rarely run out of memory.

    Peak memory grows linearly with the batch once activations outgrow what the optimizer's step needs. So
    sizes grow in leaps until three of them lie on a line, then the search jumps to the end of that line.
    Where memory does not grow linearly, the search halves the interval.
    """

    def __init__(self, *, min_size: int = 1, max_size: int = 4096) -> None:
        self._min_size = min_size
        self._max_size = max_size
        self._free_bytes: dict[int, int] = {}
        self._too_large: int | None = None

    @property
    def largest(self) -> int:
        """The largest size that fitted so far, or 0."""
        return max(self._free_bytes, default=0)

    @property
    def slope(self) -> float | None:
        """Bytes per additional sample, from the last two sizes that fitted. None with fewer."""
        sizes = sorted(self._free_bytes)[-2:]
        if len(sizes) < 2:
            return None
        return (self._free_bytes[sizes[0]] - self._free_bytes[sizes[1]]) / (sizes[1] - sizes[0])

    def record(self, size: int, free_bytes: int | None) -> None:
        """Record the outcome of an attempt.

        Args:
            free_bytes: bytes left free at the peak, negative beyond the limit, None if the attempt failed.
        """
        if free_bytes is None or free_bytes < 0:
            self._too_large = min(size, self._too_large or size)
        else:
            self._free_bytes[size] = free_bytes

    def next(self) -> int | None:
        """Return the next size to try. None once `largest` is within 3 % of the optimum."""
        if not self._free_bytes:
            return self._min_size if self._too_large is None else None
        low, high = self.largest, min(self._too_large or self._max_size + 1, self._max_size + 1)
        if high - 1 <= low * (1 + _PRECISION):
            return None
        reach, is_linear = self._extrapolate(low)
        if is_linear and reach <= low * (1 + _PRECISION):
            return None
        if self._too_large is not None and (not is_linear or reach >= high):
            reach = min(reach, (low + high) // 2)  # a line that passes a failed size is wrong
        return max(low + 1, min(reach, high - 1))

    def expected_free_bytes(self, size: int) -> int | None:
        """Return the bytes that `size` should leave free. None while fewer than two sizes fitted."""
        slope = self.slope
        if slope is None:
            return None
        low = self.largest
        return int(self._free_bytes[low] - slope * (size - low))

    def _extrapolate(self, low: int) -> tuple[int, bool]:
        """Return the largest size that should fit, and True if it follows from a line."""
        slope = self.slope
        if slope is None or slope <= 0:
            return 2 * low, False
        end = low + int(self._free_bytes[low] / slope)
        if end > _LEAP * low:  # may still be the optimizer's step
            return _LEAP * low, False
        return end, self._is_linear()

    def _is_linear(self) -> bool:
        sizes = sorted(self._free_bytes)[-3:]
        if len(sizes) < 3:
            return False
        first, second, third = sizes
        free = [self._free_bytes[size] for size in sizes]
        whole = (free[0] - free[2]) / (third - first)
        last = (free[1] - free[2]) / (third - second)
        return abs(last - whole) <= _STRAIGHT * abs(whole)


# Probes do not show fragments that build up over hours, or other processes that grow a little.
_SHARE_OF_DEVICE = 0.97
_SHARE_OF_HOST = 0.9


def find_memory_limit(device: torch.device, used_bytes: int) -> int:
    """Return the bytes that this process may take on a device, including its current usage.

    On a GPU: the free memory, less 3 %. On a host: the memory that is available there or in the process's
    control group, whichever is less, divided by the LOCAL_WORLD_SIZE ranks of this host, less 10 %.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int((free + torch.cuda.memory_reserved(device)) * _SHARE_OF_DEVICE)
    sharing = read_integer("LOCAL_WORLD_SIZE", 1, minimum=1)
    return int(host_memory.available_bytes() / sharing * _SHARE_OF_HOST) + used_bytes


_log = get_logger("train")
_T = TypeVar("_T")

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_RANKS_TIMEOUT_S = 3600.0
_MAX_SLOWER = 2  # after this many sizes in a row that are no faster, no larger size is timed


def fit_batch(
    step: Callable[[Any], object],
    sample: Any,
    state: Any,
    *,
    make_batch: Callable[[int], Any] | None = None,
    memory_limit: int | str | None = None,
    min_size: int | None = None,
    max_size: int = 4096,
    max_step_time: str | float | timedelta = "30s",
    timed_steps: int = 3,
    tuned_batch_size: int | None = None,
    global_batch_size: int | None = None,
    result: BatchFit | None = None,
    quiet: bool = False,
) -> BatchFit:
    """Find the largest batch that fits in memory, and the smallest one at full throughput.

    Memory is measured with real steps. Afterwards modules, optimizers, gradients, generators and everything
    else in `state` are restored bit for bit. Other effects of the step are not undone: do not write logs or
    count steps in it.

    The learning rate does not change. `fit_batch` prints what the known scaling rules suggest, with their
    sources.

    Args:
        step: one complete training step on a batch: forward, backward, `optimizer.step()`, zero gradients.
        sample: a batch on the training device. It is cut or repeated to reach other sizes.
        state: everything that the step changes: modules, optimizers, schedulers, tensors and generators, as
            for a Checkpointer.
        make_batch: a function from a size to a batch, if cutting and repeating `sample` does not work. Use
            the longest samples: they need the most memory.
        memory_limit: memory for one rank, in bytes or as "12GiB". Default: the free memory of the device,
            less 3 %, or of this host or its control group, less 10 %, shared by the host's ranks.
        min_size: the smallest size to try. Default: 1, or 2 if the model uses batch norm.
        max_size: the largest size to try.
        max_step_time: skip sizes with longer steps.
        timed_steps: number of steps to time for each size.
        tuned_batch_size: global batch size that the learning rate was tuned for. Default: the size of
            `sample`, times the number of ranks.
        global_batch_size: global batch size to keep. `fit_batch` prints the gradient accumulation that it
            needs.
        result: the result of an earlier search, restored from a checkpoint. If it has a size, `fit_batch`
            returns it without a search. Otherwise it is filled in.
        quiet: print nothing.

    Returns:
        `result`, or a new one. It is the same on every rank.

    Raises:
        InvalidInput: not even one sample fits, or an argument is invalid.
        RetryLater: the step failed on another rank.
        Unsupported: memory ran out during a step that communicates with other ranks.

    Ranks: collective; call it on every rank with the same arguments. The rank with the least memory decides.
    Blocks: for some tens of real steps.
    """
    result = result if result is not None else BatchFit()
    if result:
        return result
    training = training_step.collect_training_state(state)
    min_size = min_size or (2 if training.has_batch_norm else 1)
    _check(training, min_size, max_size, timed_steps)
    ranks = Ranks(timeout_s=_RANKS_TIMEOUT_S)
    if (tuned_batch_size or 1) < 1 or (global_batch_size or ranks.world_size) < ranks.world_size:
        raise InvalidInput(
            "fit_batch() needs at least one sample for every rank in tuned_batch_size and "
            f"global_batch_size, got {tuned_batch_size} and {global_batch_size} for "
            f"{plural(ranks.world_size, 'rank')}."
        )
    sample_size = training_step.batch_size_of(sample) if make_batch is None or tuned_batch_size is None else 0
    make_batch = make_batch or (lambda size: training_step.resize(sample, size))
    devices = {one for one in training.devices if one.type != "cpu"} or {torch.device("cpu")}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise Unsupported(
            f"The model is on {', '.join(sorted(map(str, devices)))}. fit_batch() supports models on the CPU "
            "or on one CUDA device per rank."
        )
    (device,) = devices
    used_bytes = training_step.count_bytes(training.all_tensors(), device)
    given_bytes = parse_bytes(memory_limit, "memory_limit") if memory_limit is not None else None
    limit_bytes = given_bytes or find_memory_limit(device, used_bytes)
    max_step_s = parse_duration(max_step_time, "max_step_time")
    with contextlib.ExitStack() as undo:
        if isinstance(state, MutableMapping):
            plain = {name: value for name, value in state.items() if isinstance(value, _PLAIN)}
            undo.callback(state.update, plain)
        undo.enter_context(training_step.restored(training))
        if device.type == "cuda" and given_bytes is not None:
            undo.enter_context(_device_limit(device, given_bytes))
        benchmark = StepBenchmark(step, make_batch, training, device, limit_bytes)
        finder = _Finder(ranks, benchmark, result, min_size, max_size, max_step_s)
        finder.search()
        finder.time_steps(timed_steps)
    ranks.barrier_and_close()
    if ranks.rank == 0 and not quiet:
        _print(result, training, tuned_batch_size or sample_size * ranks.world_size, global_batch_size)
    return result


def _check(training: TrainingState, min_size: int, max_size: int, timed_steps: int) -> None:
    unknown = [name for name in training.others if name not in {one.__name__ for one in _PLAIN}]
    if unknown or not training.modules:
        raise InvalidInput(
            f"fit_batch() cannot restore this state after its search: it has "
            f"{plural(len(training.modules), 'module')} and objects of {unknown or 'no'} types without "
            "state_dict. Pass a `state` with the model and the optimizer, in which every object has "
            "state_dict and load_state_dict."
        )
    if not 1 <= min_size <= max_size or timed_steps < 1:
        raise InvalidInput(
            "fit_batch() needs 1 <= min_size <= max_size and timed_steps >= 1, "
            f"got {min_size=}, {max_size=}, {timed_steps=}."
        )


@contextlib.contextmanager
def _device_limit(device: torch.device, limit_bytes: int) -> Iterator[None]:
    """Apply the user's limit to the device's allocator during the block."""
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@final
class _Finder(Struct):
    """The stages of a search. The ranks agree on the outcome of each; fills in `result`."""

    _ranks: RankGroup
    _benchmark: StepBenchmark
    _result: BatchFit
    _min_size: int
    _max_size: int
    _max_step_s: float
    _probes: dict[int, Probe] = {}

    def __post_init__(self) -> None:
        self._result.limit_bytes = min(self._ranks.gather(self._benchmark.limit_bytes))
        self._result.world_size = self._ranks.world_size

    def search(self) -> None:
        """Find the largest size with real steps."""
        search = Search(min_size=self._min_size, max_size=self._max_size)
        while (size := search.next()) is not None:
            free_bytes, step_s = self._try(size, search.expected_free_bytes(size))
            if search.largest and step_s > self._max_step_s:
                break
            search.record(size, free_bytes)
        self._result.largest = search.largest
        if not search.largest:
            peak_bytes = self._probes[self._min_size].peak_bytes
            peak = "more than available" if peak_bytes is None else format_bytes(peak_bytes)
            raise InvalidInput(
                f"Not even a batch of {self._min_size} fits in {format_bytes(self._result.limit_bytes)} on "
                f"every rank (its peak is {peak}). Shard the model over more "
                "ranks, use activation checkpointing, or shorten the sequences."
            )

    def _try(self, size: int, expected_free_bytes: int | None) -> tuple[int | None, float]:
        """Measure real steps on all ranks: the bytes left free, None if memory ran out, and the seconds."""
        of = self._benchmark
        self._probes[size] = Probe(size, None, False)
        if expected_free_bytes is not None:
            expected_bytes = of.limit_bytes - expected_free_bytes
            if not all(self._on_all(lambda: of.can_allocate(expected_bytes))):
                return None, 0.0

        def measure() -> tuple[int | None, int, float]:
            started_s = time.perf_counter()
            peak = of.measure_peak(size)
            return peak, of.limit_bytes, (time.perf_counter() - started_s) / training_step.STEPS_PER_PROBE

        measured = self._on_all(measure)
        step_s = max(seconds for _, _, seconds in measured)
        known = [(peak, limit - peak) for peak, limit, _ in measured if peak is not None]
        if len(known) < len(measured):
            return None, step_s
        free_bytes = min(free for _, free in known)
        self._probes[size] = Probe(size, max(peak for peak, _ in known), free_bytes >= 0)
        return free_bytes, step_s

    def time_steps(self, timed_steps: int) -> None:
        """Time sizes that fit, doubling while they get faster, and choose one."""
        sizes = [1 << power for power in range(self._result.largest.bit_length())]
        sizes = [size for size in sizes if self._min_size <= size < self._result.largest]
        best, num_slower = 0.0, 0
        for size in [*sizes, self._result.largest]:
            step_s = self._slowest(size, timed_steps)
            if step_s is None:  # it fitted before, when memory was less fragmented
                self._result.largest = size - 1
                self._probes[size] = Probe(size, None, False)
                break
            before = self._probes.get(size)
            self._probes[size] = Probe(size, before.peak_bytes if before else None, True, step_s)
            is_faster = size / step_s > best * 1.03
            best, num_slower = max(best, size / step_s), 0 if is_faster else num_slower + 1
            if num_slower == _MAX_SLOWER or step_s > self._max_step_s:
                break
        self._result.probes = tuple(self._probes[size] for size in sorted(self._probes))
        self._result.size = choose_size(self._result.probes)

    def _slowest(self, size: int, timed_steps: int) -> float | None:
        """Return the seconds of a step on the slowest rank. None if memory ran out on some rank."""
        times = self._on_all(lambda: self._benchmark.measure_step_s(size, timed_steps))
        measured = [one for one in times if one is not None]
        return max(measured) if len(measured) == len(times) else None

    def _on_all(self, measure: Callable[[], _T]) -> list[_T]:
        """Return `measure()` of all ranks. If it fails on one, every rank raises and none waits for it."""
        outcomes = self._ranks.agree(measure)
        failed = [one for one in outcomes if one.error is not None]
        if failed and outcomes[self._ranks.rank].error is None:
            rank, why = failed[0].rank, failed[0].error
            raise RetryLater(f"fit_batch() stopped because the step failed on rank {rank}: {why}", rank=rank)
        return values_of(outcomes, self._ranks.rank, "failed")


def _print(
    result: BatchFit, training: TrainingState, tuned_batch_size: int, global_batch_size: int | None
) -> None:
    """Print the result, and what it means for the learning rate and gradient accumulation."""
    lines = str(result).splitlines()
    batch_size = result.size * result.world_size
    if global_batch_size is not None:
        num, size = plan_accumulation(global_batch_size, result.size, result.world_size)
        lines.append(
            f"to keep a global batch of {global_batch_size}: accumulate "
            f"{plural(num, 'micro-batch', 'micro-batches')} of at most {size} samples on each rank per "
            "optimizer step; keep the learning rate"
        )
    elif batch_size != tuned_batch_size:
        for optimizer in training.optimizers:
            rates = {float(group["lr"]) for group in optimizer.param_groups}
            kind = type(optimizer).__name__
            for rate in sorted(one for one in rates if one > 0):
                lines.append(
                    f"if {kind}'s learning rate {rate:.3g} was tuned for a global batch of "
                    f"{tuned_batch_size}, try for {batch_size} (not changed):"
                )
                lines += scaled_rates(rate, tuned_batch_size, batch_size, optimizer=kind)
    for line in lines:
        _log.info(line)
