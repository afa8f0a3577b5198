"""Watchers of torch.compile: graph breaks and recompiles, and compiled steps compared with eager ones."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config as inductor
import torch.distributed as dist
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import CompilationMetrics, clear_compilation_metrics, get_compilation_metrics
from typing_extensions import override

from holdfast.train.tuning import source_lines, tracker
from holdfast.train.tuning.eager_watchers import DeviceClock
from holdfast.train.tuning.measurements import (
    CompileMeasurements,
    GraphBreak,
    GraphMeasurements,
    Recompile,
    SourceLine,
)
from holdfast.train.tuning.tracker import Call, OutermostModule, StepWatcher, TrainingInfo, traceable

_SHAPE_WORDS = ("size", "stride", "shape", "rank mismatch")
_RESUMED = "torch_dynamo_resume_in_"
_NO_REASON = f"torch {torch.__version__} did not record the reason"
_LINK = re.compile(r"\s*\(?(?:For more details|Hint:|See |please set|Set ).*", re.S)


class GraphWatcher(StepWatcher[GraphMeasurements]):
    """Watcher that explains the model on one batch, then traces it on the next ones.

    If the script compiles by itself, its compilations are only observed. No code is generated in either case.
    """

    def __init__(self, num_steps: int, *, compiles_itself: bool) -> None:
        self.num_steps = num_steps
        self._compiles_itself = compiles_itself
        self._explained: set[int] = set()
        self._breaks: dict[SourceLine, GraphBreak] = {}
        self._num_graphs = 0
        self._failure = ""
        self._number = 1

    @override
    def begin(self, training: TrainingInfo) -> None:
        torch._dynamo.reset()
        clear_compilation_metrics()
        if self._compiles_itself:
            torch.compiler.set_stance("default", force_backend="eager")
        else:
            torch.compiler.set_stance("force_eager")

    @override
    def intercept(self, one: OutermostModule, call: Call) -> Call:
        if self._compiles_itself:
            return call
        module = one.module
        traced = torch.compile(traceable(call), backend="eager")

        def calling(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            if id(module) not in self._explained:
                self._explained.add(id(module))
                self._explain(call, args, kwargs)
                return call(*args, **kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own warnings
                return traced(*args, **kwargs) if self._number > 1 else call(*args, **kwargs)

        return calling

    @override
    def step_done(self, number: int) -> None:
        self._number = number + 1
        if number == 1 and not self._compiles_itself:
            torch._dynamo.reset()
            clear_compilation_metrics()
            torch.compiler.set_stance("default", force_backend="eager")

    @override
    def end(self) -> GraphMeasurements:
        torch.compiler.set_stance("default")
        metrics = [one for one in get_compilation_metrics() if one.co_filename]
        if self._compiles_itself:
            self._note(torch._dynamo.utils.graph_break_reasons)
            self._num_graphs = len({(one.co_filename, one.co_firstlineno, one.co_name) for one in metrics})
        return GraphMeasurements(
            self._num_graphs,
            tuple(self._breaks.values()),
            tuple(_recompiles(metrics)),
            self._number - 1,
            self._failure,
        )

    def _explain(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch.compiler.set_stance("default")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                explanation = torch._dynamo.explain(traceable(call))(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any error of the compiler goes into the report
            self._failure = _short(str(error))
            return
        finally:
            torch.compiler.set_stance("force_eager")
        self._num_graphs += explanation.graph_count
        self._note(explanation.break_reasons)

    def _note(self, reasons: Iterable[GraphCompileReason]) -> None:
        for reason in reasons:
            place = source_lines.innermost_user_line(
                (frame.filename, frame.lineno or 0) for frame in reason.user_stack
            )
            if place is not None and source_lines.is_user_code(place.file) and reason.graph_break:
                self._breaks.setdefault(place, GraphBreak(place, _short(reason.reason)))


def _recompiles(metrics: list[CompilationMetrics]) -> list[Recompile]:
    """Return the functions that were recompiled, including those that follow graph breaks."""
    by_function: dict[tuple[str, int], list[CompilationMetrics]] = {}
    first_failures: dict[str, str] = {}  # of the guards, by the number of the compilation, as in 0/2
    for failures in torch._dynamo.utils.guard_failures.values():
        for failure in failures:
            if isinstance(failure, str):
                first_failures.setdefault(failure.partition(":")[0], failure)
    config: Any = torch._dynamo.config
    limit = getattr(config, "recompile_limit", None) or config.cache_size_limit  # its name in torch 2.6
    for one in metrics:
        by_function.setdefault((one.co_filename or "", one.co_firstlineno or 0), []).append(one)
    found = []
    for (file, line), ones in by_function.items():
        reasons = [reason for one in ones if (reason := _recompile_reason(one, first_failures))]
        if not reasons:
            continue
        failed = any("limit" in (one.fail_reason or one.fail_type or "").lower() for one in ones)
        shorts = tuple(dict.fromkeys(_reason(reason) for reason in reasons))
        found.append(
            Recompile(
                place=_line_of_recompile(reasons, file, line),
                function=(ones[0].co_name or "").replace(_RESUMED, ""),
                num_times=len(reasons),
                reasons=shorts[:8],
                hit_limit=failed or len(reasons) >= limit - 1,
                is_shape=all(any(word in reason for word in _SHAPE_WORDS) for reason in reasons),
            )
        )
    return found


def _recompile_reason(one: CompilationMetrics, first_failures: dict[str, str]) -> str:
    """Return why a function was compiled again, or "" for a first compilation."""
    # The metrics of torch 2.6 do not hold the reason. There the guards of compilation 0/2 failed for the
    # first time when 0/3 was compiled, and `guard_failures` holds that failure.
    if hasattr(one, "recompile_reason"):
        return one.recompile_reason or ""
    frame, _, number = str(one.compile_id or "").partition("/")
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


def _reason(text: str) -> str:
    """Return the first failed guard, without its number."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return re.sub(r"^\s*-?\s*(\d+/\d+:)?\s*", "", line.partition("#")[0]).strip()


def _short(text: str) -> str:
    """Return the compiler's message on one line: its explanation, if present."""
    if found := re.search(r"Explanation:\s*(.+)", text):
        return found[1].strip().rstrip(".")
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return _LINK.sub("", line).strip() or line


_MAX_COMPILING = 4  # steps with compilation per measured step, before the comparison continues without


class CompileWatcher(StepWatcher[CompileMeasurements]):
    """Watcher that alternates eager and compiled steps, after everything is compiled.

    Args:
        variant: "whole" compiles the model, "blocks" its layers one by one, "own" what the script compiles.
            "random" and "own random" use eager's random numbers, which are faster on a CPU.
    """

    def __init__(self, variant: str, num_pairs: int) -> None:
        self._variant = variant
        self._is_own = variant.startswith("own")
        self._num_pairs = num_pairs
        self.num_steps = 2 * (num_pairs + 3)
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._whole: list[float] = []
        self._compiling: list[float] = []
        self._peaks: dict[bool, list[int]] = {False: [], True: []}
        self._is_compiled = False
        self._elements = 0
        self._undo = contextlib.ExitStack()

    @override
    def begin(self, training: TrainingInfo) -> None:
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the compiler's own warnings
        self._clock = DeviceClock(training.device)
        if not self._clock.is_cuda:
            # so that all compilation happens in child processes, whose time is counted
            self._undo.enter_context(inductor.patch(compile_threads=1))
        if self._variant.endswith("random"):
            self._undo.enter_context(inductor.patch(fallback_random=True))
        if self._variant == "blocks":
            for one in training.interceptable:
                for block in tracker.find_layers(tracker.unwrap(one.module)):
                    self._undo.enter_context(tracker.intercept_calls(block, self._toggled))
        self._set(is_compiled=False)
        self._begin_step()

    @override
    def intercept(self, one: OutermostModule, call: Call) -> Call:
        chosen = call if self._is_own or self._variant == "blocks" else self._toggled(call)

        def calling(*args: Any, **kwargs: Any) -> Any:
            tensors = tracker.find_tensors((args, kwargs))
            self._elements += max((tensor.numel() for tensor in tensors), default=0)
            return chosen(*args, **kwargs)

        return calling

    @override
    def step_done(self, number: int) -> None:
        self._clock.synchronize()
        seconds = self._clock.now_s() - self._started_s
        spent_s = self._clock.total_spent_s() - self._started_spent_s
        peak, used = self._clock.peak_bytes(), self._started_bytes
        may_wait = len(self._compiling) < _MAX_COMPILING * self._num_pairs
        if self._is_compiled and self._has_compiled() and may_wait:
            self._compiling.append(spent_s)
            self.num_steps += 2
        elif number > 2:
            self._times[self._is_compiled].append(seconds / max(1, self._elements))
            if not self._is_compiled:
                self._whole.append(seconds)
            if peak is not None and used is not None:
                self._peaks[self._is_compiled].append(peak - used)
        self._set(is_compiled=not self._is_compiled)
        self._begin_step()

    @override
    def end(self) -> CompileMeasurements:
        self._undo.close()
        torch.compiler.set_stance("default")
        eager, compiled = (tuple(self._times[key][-self._num_pairs :]) for key in (False, True))
        typical_s = _middle(self._whole)
        scale = typical_s / (_middle(eager) or 1.0)
        warm_up_s = sum(self._compiling) - len(self._compiling) * _middle(compiled) * scale
        return CompileMeasurements(
            variant=self._variant,
            device=self._clock.device.type,
            eager_s=eager,
            compiled_s=compiled,
            warm_up_s=max(0.0, warm_up_s),
            step_s=typical_s,
            eager_bytes=int(_middle(self._peaks[False])) if self._peaks[False] else None,
            compiled_bytes=int(_middle(self._peaks[True])) if self._peaks[True] else None,
        )

    def _has_compiled(self) -> bool:
        """Return True if any rank compiled something in this step, so that all ranks agree."""
        has = tracker.compilation_state() != self._compiled_before
        if not (dist.is_available() and dist.is_initialized()):
            return has
        flag = torch.tensor([float(has)], device=self._clock.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _toggled(self, call: Call) -> Call:
        compiled = torch.compile(tracker.traceable(call))
        return lambda *args, **kwargs: (compiled if self._is_compiled else call)(*args, **kwargs)

    def _set(self, *, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        if self._is_own:
            torch.compiler.set_stance("default" if is_compiled else "force_eager")

    def _begin_step(self) -> None:
        self._elements = 0
        self._compiled_before = tracker.compilation_state()
        self._clock.reset_peak()
        self._started_bytes = self._clock.used_bytes()
        self._started_spent_s = self._clock.total_spent_s()
        self._started_s = self._clock.now_s()


def _middle(values: Any) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
