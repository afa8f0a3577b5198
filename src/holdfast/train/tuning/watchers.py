"""Watchers of eager and compiled steps: time, waits for data, host syncs, graph breaks and recompiles.

Source: torch's function modes, which observe every such call of Python, even if no operator runs.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.debugging import ExplainOutput
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import CompilationMetrics, clear_compilation_metrics, get_compilation_metrics
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.train.tuning import measurements, source_lines, tracker
from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.measurements import SourceLine, StepTiming
from holdfast.train.tuning.script_profile import RunSpec
from holdfast.train.tuning.tracker import Call, TrainingInfo, Watcher, Watching

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
                tensors = [one for one in tracker.find_tensors((args, kwargs)) if one.dim() > 0]
                mask = kwargs.get("attention_mask")
                given.extend([(tensors, mask if isinstance(mask, Tensor) else None)] if tensors else [])
            return call(*args, **kwargs)

        return calling

    with tracker.intercepted(training, noted):
        for number in range(num_steps + _WARM_UP):
            given.clear()
            started, compiled = loaders.num_started, tracker.compilation_state()
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
                steps.append(StepTiming(wall_s, cpu_s, waited_s, num_items, is_odd))
            # After the timing, since reading the inputs makes the host wait.
            if largest:
                shapes.append(str(tuple(max((one.shape for one in largest), key=torch.Size.numel))))
            for tensors, mask in given:
                if len(rows) < _MAX_BATCHES and (found := useful_lengths(tensors, mask)) is not None:
                    rows.append(found[0])
                    widths.append(found[1])
    modules = [tracker.unwrap(one.module) for one in training.modules]
    return measurements.StepMeasurements(
        device=training.device.type,
        steps=tuple(steps),
        call=next((one.place for one in training.modules if one.place is not None), None),
        loader=loader,
        shapes=tuple(shapes),
        lengths=measurements.RowLengths(tuple(rows), tuple(widths)) if rows else None,
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
    eagerly = torch.compiler.set_stance("force_eager")  # a function mode would cause recompiles
    with eagerly, observer, tracker.intercepted(training, observer.follow_call):
        while observer.num_done < num_steps and (yield):
            observer.num_done += 1
    return measurements.SyncMeasurements(training.device.type, observer.num_done, tuple(observer.syncs()))


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

    def syncs(self) -> Iterator[measurements.HostSync]:
        """Yield the lines that make the host wait, each with all of its calls."""
        for (kind, place), calls in self._calls.items():
            num_steps = len({step for step, *_ in calls})
            _, _, library, in_forward = calls[0]
            seconds = sum(seconds for _, seconds, *_ in calls)
            yield measurements.HostSync(kind, place, library, num_steps, len(calls), seconds, in_forward)

    def follow_call(self, call: Call) -> Call:
        """Return the function to call instead of that of a module."""

        def calling(*args: Any, **kwargs: Any) -> Any:
            self._mark(tracker.find_tensors((args, kwargs)))
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
            given = list(tracker.find_tensors((args, kwargs)))
            if self._depth or any(tensor in self._on_device for tensor in given):
                self._mark((*given, *tracker.find_tensors(result)))
        if found is not None and kind is not None:
            place, library = found
            call = self.num_done, seconds, library, self._depth > 0
            self._calls.setdefault((kind, place), []).append(call)
        return result

    def _waits(self, args: tuple[Any, ...]) -> bool:
        """Return True if the call needs a value that would be on the device."""
        given = [tensor for tensor in tracker.find_tensors(args) if tensor.device.type != "meta"]
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


_SHAPE_WORDS = ("size", "stride", "shape", "rank mismatch")
_RESUMED = "torch_dynamo_resume_in_"
_NUMBER = re.compile(r"^\s*-?\s*(\d+/\d+:)?\s*")  # of the first failed guard in a reason
_NO_REASON = f"torch {torch.__version__} did not record the reason"
_LINK = re.compile(r"\s*\(?(?:For more details|Hint:|See |please set|Set ).*", re.S)


def watch_graphs(training: TrainingInfo, *, num_steps: int, compiles_itself: bool) -> Watching:
    """Explain the model on one batch, then trace it on the next ones.

    If the script compiles by itself, its compilations are only observed. No code is generated in either case.
    """
    breaks: dict[SourceLine, measurements.GraphBreak] = {}
    num_done, num_graphs, failure = 0, 0, ""

    def traced(call: Call) -> Call:
        compiled, is_explained = torch.compile(tracker.traceable(call), backend="eager"), False

        def calling(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_explained, num_graphs, failure
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            if not is_explained:
                is_explained = True
                found = _explain(call, args, kwargs)
                if isinstance(found, str):
                    failure = found
                else:
                    num_graphs += found.graph_count
                    _note(breaks, found.break_reasons)
                return call(*args, **kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own warnings
                return (compiled if num_done else call)(*args, **kwargs)

        return calling

    _forget(compiles_itself)
    with contextlib.nullcontext() if compiles_itself else tracker.intercepted(training, traced):
        while num_done < num_steps and (yield):
            num_done += 1
            if num_done == 1 and not compiles_itself:
                _forget(True)
    torch.compiler.set_stance("default")
    metrics = [one for one in get_compilation_metrics() if one.co_filename]
    if compiles_itself:
        _note(breaks, torch._dynamo.utils.graph_break_reasons)
        num_graphs = len({(one.co_filename, one.co_firstlineno, one.co_name) for one in metrics})
    recompiles = tuple(_recompiles(metrics))
    return measurements.GraphMeasurements(num_graphs, tuple(breaks.values()), recompiles, num_done, failure)


def _forget(traces: bool) -> None:
    """Forget all compilations, and trace from now on without generating code, or run eagerly."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    if traces:
        torch.compiler.set_stance("default", force_backend="eager")
    else:
        torch.compiler.set_stance("force_eager")


def _explain(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExplainOutput | str:
    """Return the compiler's explanation of a call, or its error."""
    try:
        with torch.compiler.set_stance("default"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch._dynamo.explain(tracker.traceable(call))(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - any error of the compiler goes into the report
        return _short(str(error))


def _note(breaks: dict[SourceLine, measurements.GraphBreak], reasons: Iterable[GraphCompileReason]) -> None:
    for reason in reasons:
        place = source_lines.innermost_user_line(
            (frame.filename, frame.lineno or 0) for frame in reason.user_stack
        )
        if place is not None and source_lines.is_user_code(place.file) and reason.graph_break:
            breaks.setdefault(place, measurements.GraphBreak(place, _short(reason.reason)))


def _recompiles(metrics: list[CompilationMetrics]) -> Iterator[measurements.Recompile]:
    """Yield the functions that were recompiled, including those that follow graph breaks."""
    by_function: dict[tuple[str, int], list[CompilationMetrics]] = defaultdict(list)
    first_failures: dict[str, str] = {}  # of the guards, by the number of the compilation, as in 0/2
    for failures in torch._dynamo.utils.guard_failures.values():
        for failure in failures:
            if isinstance(failure, str):
                first_failures.setdefault(failure.partition(":")[0], failure)
    config: Any = torch._dynamo.config
    limit = getattr(config, "recompile_limit", None) or config.cache_size_limit  # its name in torch 2.6
    for compilation in metrics:
        by_function[compilation.co_filename or "", compilation.co_firstlineno or 0].append(compilation)
    for (file, line), compilations in by_function.items():
        reasons = [reason for one in compilations if (reason := _recompile_reason(one, first_failures))]
        if not reasons:
            continue
        failed = any("limit" in (one.fail_reason or one.fail_type or "").lower() for one in compilations)
        guards = (next((line for line in one.splitlines() if line.strip()), "") for one in reasons)
        shorts = tuple(dict.fromkeys(_NUMBER.sub("", guard.partition("#")[0]).strip() for guard in guards))
        yield measurements.Recompile(
            place=_line_of_recompile(reasons, file, line),
            function=(compilations[0].co_name or "").replace(_RESUMED, ""),
            num_times=len(reasons),
            reasons=shorts[:8],
            hit_limit=failed or len(reasons) >= limit - 1,
            is_shape=all(any(word in reason for word in _SHAPE_WORDS) for reason in reasons),
        )


def _recompile_reason(compilation: CompilationMetrics, first_failures: dict[str, str]) -> str:
    """Return why a function was compiled again, or "" for a first compilation."""
    # The metrics of torch 2.6 do not hold the reason. There the guards of compilation 0/2 failed for the
    # first time when 0/3 was compiled, and `guard_failures` holds that failure.
    if hasattr(compilation, "recompile_reason"):
        return compilation.recompile_reason or ""
    frame, _, number = str(compilation.compile_id or "").partition("/")
    if not number.isdecimal() or number == "0":
        return ""
    return first_failures.get(f"{frame}/{int(number) - 1}", _NO_REASON)


def _line_of_recompile(reasons: list[str], file: str, line: int) -> SourceLine:
    """Return the user's line in a guard's reason, otherwise the first line of the function."""
    files = {file, *(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))}
    for reason in reversed(reasons):
        for end, number in re.findall(r"#.*?([^\s#]+\.py):(\d+) in", reason):
            for whole in (file, *files):  # torch truncates long paths at the start
                if whole.endswith(end) and source_lines.is_user_code(whole):
                    return source_lines.line_at(whole, int(number))
    return source_lines.line_at(file, line)


def _short(text: str) -> str:
    """Return the compiler's message on one line: its explanation, if present."""
    if found := re.search(r"Explanation:\s*(.+)", text):
        return found[1].strip().rstrip(".")
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return _LINK.sub("", line).strip() or line


_MAX_COMPILING = 4  # steps with compilation per measured step, before the comparison continues without


def watch_compiled(training: TrainingInfo, *, variant: str, num_pairs: int) -> Watching:
    """Alternate eager and compiled steps, after everything is compiled.

    The variant "whole" compiles the model, "blocks" its layers one by one, "own" what the script compiles.
    "random" and "own random" use eager's random numbers, which are faster on a CPU.
    """
    is_own, clock = variant.startswith("own"), DeviceClock(training.device)
    times: dict[bool, list[float]] = {False: [], True: []}
    peaks: dict[bool, list[int]] = {False: [], True: []}
    whole, compiling = list[float](), list[float]()
    is_compiled, num_elements = False, 0

    def toggled(call: Call) -> Call:
        compiled = torch.compile(tracker.traceable(call))
        return lambda *args, **kwargs: (compiled if is_compiled else call)(*args, **kwargs)

    def counted(call: Call) -> Call:
        chosen = call if is_own or variant == "blocks" else toggled(call)

        def calling(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_elements
            tensors = tracker.find_tensors((args, kwargs))
            num_elements += max((tensor.numel() for tensor in tensors), default=0)
            return chosen(*args, **kwargs)

        return calling

    with _compiling(training, variant, toggled, clock), tracker.intercepted(training, counted):
        num_done, num_steps = 0, 2 * (num_pairs + 3)
        while num_done < num_steps:
            num_elements, compiled_before = 0, tracker.compilation_state()
            clock.reset_peak()
            used, spent_s, started_s = clock.used_bytes(), clock.total_spent_s(), clock.now_s()
            if not (yield):
                break
            num_done += 1
            clock.synchronize()
            seconds, spent_s = clock.now_s() - started_s, clock.total_spent_s() - spent_s
            peak, may_wait = clock.peak_bytes(), len(compiling) < _MAX_COMPILING * num_pairs
            if is_compiled and _has_compiled(compiled_before, clock.device) and may_wait:
                compiling.append(spent_s)
                num_steps += 2
            elif num_done > 2:
                times[is_compiled].append(seconds / max(1, num_elements))
                whole += [] if is_compiled else [seconds]
                peaks[is_compiled] += [] if peak is None or used is None else [peak - used]
            is_compiled = not is_compiled
            if is_own:
                torch.compiler.set_stance("default" if is_compiled else "force_eager")
    eager, compiled = (tuple(times[key][-num_pairs:]) for key in (False, True))
    typical_s = _middle(whole)
    warm_up_s = sum(compiling) - len(compiling) * _middle(compiled) * typical_s / (_middle(eager) or 1.0)
    return measurements.CompileMeasurements(
        variant=variant,
        eager_s=eager,
        compiled_s=compiled,
        warm_up_s=max(0.0, warm_up_s),
        step_s=typical_s,
        eager_bytes=int(_middle(peaks[False])) if peaks[False] else None,
        compiled_bytes=int(_middle(peaks[True])) if peaks[True] else None,
    )


@contextlib.contextmanager
def _compiling(
    training: TrainingInfo, variant: str, toggled: Callable[[Call], Call], clock: DeviceClock
) -> Iterator[None]:
    """Prepare a way to compile during the block."""
    with contextlib.ExitStack() as undo:
        undo.callback(torch.compiler.set_stance, "default")
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the compiler's own warnings
        if not clock.is_cuda:
            # so that all compilation happens in child processes, whose time is counted
            undo.enter_context(inductor.patch(compile_threads=1))
        if variant.endswith("random"):
            undo.enter_context(inductor.patch(fallback_random=True))
        if variant == "blocks":
            for called in training.interceptable:
                for block in tracker.find_layers(tracker.unwrap(called.module)):
                    undo.enter_context(tracker.intercept_calls(block, toggled))
        if variant.startswith("own"):
            torch.compiler.set_stance("force_eager")
        yield


def _has_compiled(before: object, device: torch.device) -> bool:
    """Return True if any rank compiled something in a step, so that all ranks agree."""
    has = tracker.compilation_state() != before
    if not (dist.is_available() and dist.is_initialized()):
        return has
    flag = torch.tensor([float(has)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _middle(values: Any) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def make_watcher(spec: RunSpec, loaders: LoaderMonitor, compiled_at: list[SourceLine]) -> Watcher:
    """Return the watcher for a question."""
    if spec.question == "steps":
        return partial(watch_steps, num_steps=spec.num_steps, loaders=loaders, compiled_at=compiled_at)
    if spec.question == "syncs":
        return partial(watch_syncs, num_steps=spec.num_steps)
    if spec.question == "graphs":
        return partial(watch_graphs, num_steps=spec.num_steps, compiles_itself=spec.compiles_itself)
    return partial(watch_compiled, variant=spec.variant, num_pairs=spec.num_steps)
