"""Watchers of torch.compile: graph breaks and recompiles, and compiled steps compared with eager ones."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config as inductor
import torch.distributed as dist
from torch._dynamo.backends.debugging import ExplainOutput
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import CompilationMetrics, clear_compilation_metrics, get_compilation_metrics

from holdfast.train.tuning import source_lines, tracker
from holdfast.train.tuning.eager_watchers import DeviceClock
from holdfast.train.tuning.measurements import (
    CompileMeasurements,
    GraphBreak,
    GraphMeasurements,
    Recompile,
    SourceLine,
)
from holdfast.train.tuning.tracker import Call, TrainingInfo, Watching, intercepted, traceable

_SHAPE_WORDS = ("size", "stride", "shape", "rank mismatch")
_RESUMED = "torch_dynamo_resume_in_"
_NUMBER = re.compile(r"^\s*-?\s*(\d+/\d+:)?\s*")  # of the first failed guard in a reason
_NO_REASON = f"torch {torch.__version__} did not record the reason"
_LINK = re.compile(r"\s*\(?(?:For more details|Hint:|See |please set|Set ).*", re.S)


def watch_graphs(training: TrainingInfo, *, num_steps: int, compiles_itself: bool) -> Watching:
    """Explain the model on one batch, then trace it on the next ones.

    If the script compiles by itself, its compilations are only observed. No code is generated in either case.
    """
    breaks: dict[SourceLine, GraphBreak] = {}
    num_done, num_graphs, failure = 0, 0, ""

    def traced(call: Call) -> Call:
        compiled, is_explained = torch.compile(traceable(call), backend="eager"), False

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
    with contextlib.nullcontext() if compiles_itself else intercepted(training, traced):
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
    return GraphMeasurements(num_graphs, tuple(breaks.values()), recompiles, num_done, failure)


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
    torch.compiler.set_stance("default")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch._dynamo.explain(traceable(call))(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - any error of the compiler goes into the report
        return _short(str(error))
    finally:
        torch.compiler.set_stance("force_eager")


def _note(breaks: dict[SourceLine, GraphBreak], reasons: Iterable[GraphCompileReason]) -> None:
    for reason in reasons:
        place = source_lines.innermost_user_line(
            (frame.filename, frame.lineno or 0) for frame in reason.user_stack
        )
        if place is not None and source_lines.is_user_code(place.file) and reason.graph_break:
            breaks.setdefault(place, GraphBreak(place, _short(reason.reason)))


def _recompiles(metrics: list[CompilationMetrics]) -> Iterator[Recompile]:
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
        yield Recompile(
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

    with _compiling(training, variant, toggled, clock), intercepted(training, counted):
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
    return CompileMeasurements(
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
