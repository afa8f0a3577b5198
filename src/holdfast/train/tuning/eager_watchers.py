"""Watchers of eager steps: their duration, waits for data and inputs, and the lines that make the host wait.

Source: torch's function modes, which observe every such call of Python, even if no operator runs.
"""

from __future__ import annotations

import contextlib
import re
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.train.tuning import source_lines, tracker
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import (
    HostSync,
    RowLengths,
    SourceLine,
    StepMeasurements,
    StepTiming,
    SyncMeasurements,
)
from holdfast.train.tuning.tracker import Call, TrainingInfo, Watching, find_tensors, intercepted

_STATUS = Path("/proc/self/status")


class DeviceClock:
    """Clock and memory meter for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._can_reset = True

    def synchronize(self) -> None:
        """Wait until the device has finished its queue."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def now_s(self) -> float:
        """Return seconds of work: CPU time of this process on a CPU, otherwise wall time."""
        return time.perf_counter() if self.is_cuda else time.process_time()

    def total_spent_s(self) -> float:
        """Return the same, including the CPU time of child processes such as compilers."""
        if self.is_cuda:
            return time.perf_counter()
        both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(one.ru_utime + one.ru_stime for one in both)

    def reset_peak(self) -> None:
        """Reset the peak of memory."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._can_reset:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self._can_reset = False  # then peaks of single steps cannot be measured

    def peak_bytes(self) -> int | None:
        """Return the peak of memory since `reset_peak`, or None if it cannot be measured."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return _status_bytes("VmHWM") if self._can_reset else None

    def used_bytes(self) -> int | None:
        """Return the memory in use now."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{key}:\s*(\d+) kB", _STATUS.read_text(), re.M):
            return int(found[1]) * 1024
    return None


_MIN_TAIL = 4  # equal tokens at the end of a row that count as padding


def useful_lengths(given: Iterable[Tensor], mask: Tensor | None) -> tuple[tuple[int, ...], int] | None:
    """Return the useful length of each row of a batch, and their padded length. None without rows of tokens.

    The attention mask counts, of shape (rows, length), or else the first integer tensor of that shape.
    """
    if mask is not None and mask.dim() == 2:
        return tuple(int(length) for length in (mask != 0).sum(dim=1).tolist()), mask.shape[1]
    whole = (torch.int64, torch.int32, torch.int16, torch.uint8)
    tokens = next((one for one in given if one.dim() == 2 and one.dtype in whole and one.shape[1] > 1), None)
    if tokens is None:
        return None
    tokens = tokens.detach().cpu()
    width = tokens.shape[1]
    ends = tokens == tokens[:, -1:]
    tails = ends.flip(1).long().cumprod(dim=1).sum(dim=1)
    values = [int(value) for value in tokens[tails >= _MIN_TAIL, -1].tolist()]
    padding, times = Counter(values).most_common(1)[0] if values else (0, 0)
    if times * 4 < tokens.shape[0]:  # a few rows end with equal tokens by chance
        return (width,) * tokens.shape[0], width
    pads = tokens[:, -1] == padding
    lengths = torch.where(pads, width - tails, torch.full_like(tails, width))
    return tuple(max(1, int(length)) for length in lengths.tolist()), width


_WARM_UP = 2
_MAX_BATCHES = 256  # enough lengths to compare paddings


def watch_steps(
    training: TrainingInfo, *, num_steps: int, loaders: LoaderMonitor, compiled_at: list[SourceLine]
) -> Watching:
    """Time unmodified steps."""
    clock, loader = DeviceClock(training.device), loaders.last_loader()
    steps, shapes, rows, widths = list[StepTiming](), list[str](), list[tuple[int, ...]](), list[int]()
    given: list[tuple[list[Tensor], Tensor | None]] = []  # tensors and attention mask of each call

    def noted(call: Call) -> Call:
        def calling(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                tensors = [one for one in find_tensors((args, kwargs)) if one.dim() > 0]
                mask = kwargs.get("attention_mask")
                given.extend([(tensors, mask if isinstance(mask, Tensor) else None)] if tensors else [])
            return call(*args, **kwargs)

        return calling

    with intercepted(training, noted):
        for number in range(num_steps + _WARM_UP):
            given.clear()
            started, compiled = loaders.num_started, tracker.compilation_state()
            clock.reset_peak()
            loaders.pop_waited()
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            if not (yield):
                break
            clock.synchronize()
            wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
            is_odd = loaders.num_started != started or tracker.compilation_state() != compiled
            largest = [max(tensors, key=Tensor.numel) for tensors, _ in given]
            if number >= _WARM_UP:
                waited_s, num_loaded = loaders.pop_waited()
                num_items = sum(one.shape[0] for one in largest) or num_loaded
                steps.append(StepTiming(wall_s, cpu_s, waited_s, num_items, clock.peak_bytes(), is_odd))
            # After the timing, since reading the inputs makes the host wait.
            if largest:
                shapes.append(str(tuple(max((one.shape for one in largest), key=torch.Size.numel))))
            for tensors, mask in given:
                if len(rows) < _MAX_BATCHES and (found := useful_lengths(tensors, mask)) is not None:
                    rows.append(found[0])
                    widths.append(found[1])
    group = training.optimizer.param_groups[0]
    rate = group.get("initial_lr", group.get("lr"))  # a schedule changes "lr"
    modules = [tracker.unwrap(one.module) for one in training.modules]
    return StepMeasurements(
        device=training.device.type,
        steps=tuple(steps),
        call=next((one.place for one in training.modules if one.place is not None), None),
        optimizer=type(training.optimizer).__name__,
        learning_rate=None if rate is None else float(rate),
        loader=loader,
        shapes=tuple(shapes),
        lengths=RowLengths(tuple(rows), tuple(widths)) if rows else None,
        compiled_at=compiled_at[0] if compiled_at else None,
        has_random=any(tracker.uses_randomness(module) for module in modules),
        num_blocks=sum(len(tracker.find_layers(module)) for module in modules),
        in_place=all(tracker.compiles_in_place(module) for module in modules),
    )


_CALLS: dict[Any, str] = {
    Tensor.__array__: ".numpy()",
    Tensor.__bool__: "bool()",
    Tensor.__float__: "float()",
    Tensor.__int__: "int()",
    Tensor.__index__: "int()",
    Tensor.__complex__: "complex()",
    Tensor.__repr__: "print()",
    Tensor.__format__: "print()",
    Tensor.__contains__: "in",
}
_COUNTS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
for _name in (*_COUNTS, "equal", "allclose"):
    _CALLS[getattr(Tensor, _name)] = _CALLS[getattr(torch, _name)] = f".{_name}()"
for _name in ("item", "tolist", "numpy", "cpu"):
    _CALLS[getattr(Tensor, _name)] = f".{_name}()"
_LOADING = ("/torch/utils/data/", "/torchdata/")


def watch_syncs(training: TrainingInfo, *, num_steps: int) -> Watching:
    """Record every call in eager steps that needs a value of the device."""
    observer = _SyncObserver(training)
    torch.compiler.set_stance("force_eager")  # a function mode would cause recompiles
    with observer, intercepted(training, observer.follow_call):
        while observer.num_done < num_steps and (yield):
            observer.num_done += 1
    torch.compiler.set_stance("default")
    return SyncMeasurements(training.device.type, observer.num_done, tuple(observer.syncs()))


class _SyncObserver(TorchFunctionMode):
    """Observer of every torch function.

    On a CPU all values are available. There a call counts only if it would wait on a GPU: if it concerns a
    tensor of the model or computed by it, and not a batch as it came from a loader.
    """

    def __init__(self, training: TrainingInfo) -> None:
        super().__init__()
        self.num_done = 0  # steps
        # By kind and line: step and seconds of each call, the library line, and if it is in the model.
        self._calls: dict[tuple[str, SourceLine], list[tuple[int, float, SourceLine | None, bool]]] = {}
        self._device = training.device
        self._depth = 0
        self._on_device: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for called in training.modules:
            self._mark((*called.module.parameters(), *called.module.buffers()))

    def syncs(self) -> Iterator[HostSync]:
        """Yield the lines that make the host wait, each with all of its calls."""
        for (kind, place), calls in self._calls.items():
            num_steps = len({step for step, *_ in calls})
            _, _, library, in_forward = calls[0]
            seconds = sum(seconds for _, seconds, *_ in calls)
            yield HostSync(kind, place, library, num_steps, len(calls), seconds, in_forward)

    def follow_call(self, call: Call) -> Call:
        """Return the function to call instead of that of a module."""

        def calling(*args: Any, **kwargs: Any) -> Any:
            self._mark(find_tensors((args, kwargs)))
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1

        return calling

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._on_device[tensor] = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind, found = _kind(func, args, kwargs), None
        if kind is not None and self._waits(args) and not source_lines.is_running(*_LOADING):
            found = source_lines.current_line_and_library()
        started_s = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - started_s
        if self._device.type == "cpu":  # what an operation combines with a device tensor is there too
            given = list(find_tensors((args, kwargs)))
            if self._depth or any(tensor in self._on_device for tensor in given):
                self._mark((*given, *find_tensors(result)))
        if found is not None and kind is not None:
            place, library = found
            call = self.num_done, seconds, library, self._depth > 0
            self._calls.setdefault((kind, place), []).append(call)
        return result

    def _waits(self, args: tuple[Any, ...]) -> bool:
        """Return True if the call needs a value that would be on the device."""
        given = [tensor for tensor in find_tensors(args) if tensor.device.type != "meta"]
        if self._device.type != "cpu":
            return any(tensor.device.type == self._device.type for tensor in given)
        return any(self._depth or tensor in self._on_device for tensor in given)


def _kind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of a call that makes the host wait, otherwise None."""
    if (kind := _CALLS.get(function)) is not None:
        return kind
    if function in (Tensor.__getitem__, Tensor.__setitem__):
        # `x[mask] = number` fills without counting.
        fills = function is Tensor.__setitem__ and not (isinstance(args[2], Tensor) and args[2].dim())
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [one for one in parts if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8)]
        return "x[mask]" if not fills and any(one.dim() for one in masks) else None
    if function is Tensor.to and args[0].device.type != "cpu":
        wanted = [*args[1:], *kwargs.values()]
        to_host = any(str(one) == "cpu" for one in wanted if isinstance(one, (str, torch.device)))
        return ".to('cpu')" if to_host else None
    if function is torch.where and len(args) == 1 and not kwargs.keys() - {"condition"}:
        return ".nonzero()"
    is_repeat = function in (torch.repeat_interleave, Tensor.repeat_interleave)
    is_counted = is_repeat and "output_size" not in kwargs and isinstance((*args, None, None)[1], Tensor)
    return ".repeat_interleave()" if is_counted else None
