"""Comparison of eager and compiled steps, taken in turns in one training."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from typing_extensions import override

from holdfast.train.tuning import modules
from holdfast.train.tuning.measurements import CompileMeasurements
from holdfast.train.tuning.modules import Call, OutermostModule
from holdfast.train.tuning.timing_watcher import DeviceClock
from holdfast.train.tuning.tracker import StepWatcher, TrainingInfo

_MAX_COMPILING = 4  # steps with compilation per measured step, before the comparison continues without


class CompileWatcher(StepWatcher):
    """Watcher that alternates eager and compiled steps, after everything is compiled.

    Args:
        variant: "whole" compiles the model, "blocks" its layers one by one, "own" what the script compiles.
            "random" and "own random" use eager's random numbers, which are faster on a CPU.
        num_pairs: measured steps of each kind.
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
                for block in modules.find_layers(modules.unwrap(one.module)):
                    self._undo.enter_context(modules.intercept_calls(block, self._toggled))
        self._set(is_compiled=False)
        self._begin_step()

    @override
    def intercept(self, one: OutermostModule, call: Call) -> Call:
        chosen = call if self._is_own or self._variant == "blocks" else self._toggled(call)

        def calling(*args: Any, **kwargs: Any) -> Any:
            self._elements += max(
                (tensor.numel() for tensor in modules.find_tensors((args, kwargs))), default=0
            )
            return chosen(*args, **kwargs)

        return calling

    @override
    def step_done(self, number: int) -> None:
        self._clock.synchronize()
        seconds, total_spent_s = (
            self._clock.now_s() - self._started_s,
            self._clock.total_spent_s() - self._started_spent_s,
        )
        peak, used = self._clock.peak_bytes(), self._started_bytes
        if self._is_compiled and self._has_compiled() and self._may_wait():
            self._compiling.append(total_spent_s)
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
            eager_bytes=_middle_bytes(self._peaks[False]),
            compiled_bytes=_middle_bytes(self._peaks[True]),
        )

    def _has_compiled(self) -> bool:
        """Return True if any rank compiled something in this step, so that all ranks agree."""
        has = modules.compilation_state() != self._compiled_before
        if not (dist.is_available() and dist.is_initialized()):
            return has
        flag = torch.tensor([float(has)], device=self._clock.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _may_wait(self) -> bool:
        return len(self._compiling) < _MAX_COMPILING * self._num_pairs

    def _toggled(self, call: Call) -> Call:
        compiled = torch.compile(modules.traceable(call))
        return lambda *args, **kwargs: (compiled if self._is_compiled else call)(*args, **kwargs)

    def _set(self, *, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        if self._is_own:
            torch.compiler.set_stance("default" if is_compiled else "force_eager")

    def _begin_step(self) -> None:
        self._elements = 0
        self._compiled_before = modules.compilation_state()
        self._clock.reset_peak()
        self._started_bytes = self._clock.used_bytes()
        self._started_spent_s = self._clock.total_spent_s()
        self._started_s = self._clock.now_s()


def _middle(values: Any) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _middle_bytes(values: list[int]) -> int | None:
    return int(_middle(values)) if values else None
