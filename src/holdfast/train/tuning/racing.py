"""Eager against compiled: one training takes steps of both kinds in turns, on the same machine."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from typing_extensions import override

from holdfast.train.tuning import modules
from holdfast.train.tuning.clock import Clock
from holdfast.train.tuning.facts import Race
from holdfast.train.tuning.modules import Call, Outermost
from holdfast.train.tuning.probe import Scene, Watcher

VARIANTS = ("whole", "blocks", "random", "own", "own random")
"""The model as one; its layers one by one; as one with eager's random numbers, which are quicker on a CPU;
what the script itself compiles; and that with eager's random numbers."""
_PATIENCE = 4  # times as many compiled steps as measured ones may compile something, before we go on without


class Racing(Watcher):
    """Takes `num_pairs` eager and as many compiled steps in turns, after what has to be compiled was.

    Args:
        variant: see `VARIANTS`.
        num_pairs: measured steps of each kind.
    """

    def __init__(self, variant: str, num_pairs: int) -> None:
        self._variant = variant
        self._is_own = variant.startswith("own")
        self._num_pairs = num_pairs
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._whole: list[float] = []
        self._compiling: list[float] = []
        self._peaks: dict[bool, list[int]] = {False: [], True: []}
        self._is_compiled = False
        self._elements = 0
        self._undo = contextlib.ExitStack()

    @property
    def num_steps(self) -> int:
        """See `Watcher`; more are needed if shapes go on to be compiled anew."""
        return 2 * (self._num_pairs + 3 + len(self._compiling))

    @override
    def begin(self, scene: Scene) -> None:
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the compiler warns of what it does itself
        self._clock = Clock(scene.device)
        if not self._clock.is_cuda:
            # so that all compiling is done by children whose time is counted
            self._undo.enter_context(inductor.patch(compile_threads=1))
        if self._variant.endswith("random"):
            self._undo.enter_context(inductor.patch(fallback_random=True))
        if self._variant == "blocks":
            for one in scene.callable:
                for block in modules.blocks(modules.inner(one.module)):
                    self._undo.enter_context(modules.calls_through(block, self._toggled))
        self._set(is_compiled=False)
        self._begin_step()

    @override
    def called(self, one: Outermost, call: Call) -> Call:
        chosen = call if self._is_own or self._variant == "blocks" else self._toggled(call)

        def calling(*args: Any, **kwargs: Any) -> Any:
            self._elements += max((tensor.numel() for tensor in modules.tensors((args, kwargs))), default=0)
            return chosen(*args, **kwargs)

        return calling

    @override
    def stepped(self, number: int) -> None:
        self._clock.settle()
        seconds, spent_s = self._clock.now_s() - self._began_s, self._clock.spent_s() - self._began_spent_s
        peak, used = self._clock.peak_bytes(), self._began_bytes
        if self._is_compiled and self._has_compiled() and self._may_wait():
            self._compiling.append(spent_s)
        elif number > 2:
            self._times[self._is_compiled].append(seconds / max(1, self._elements))
            if not self._is_compiled:
                self._whole.append(seconds)
            if peak is not None and used is not None:
                self._peaks[self._is_compiled].append(peak - used)
        self._set(is_compiled=not self._is_compiled)
        self._begin_step()

    @override
    def end(self) -> Race:
        self._undo.close()
        torch.compiler.set_stance("default")
        eager, compiled = (tuple(self._times[key][-self._num_pairs :]) for key in (False, True))
        typical_s = _middle(self._whole)
        scale = typical_s / (_middle(eager) or 1.0)
        warm_up_s = sum(self._compiling) - len(self._compiling) * _middle(compiled) * scale
        return Race(
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
        """True if something was compiled in this step, on any rank: all go on for as many steps."""
        has = modules.compilations() != self._compiled_before
        if not (dist.is_available() and dist.is_initialized()):
            return has
        flag = torch.tensor([float(has)], device=self._clock.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _may_wait(self) -> bool:
        return len(self._compiling) < _PATIENCE * self._num_pairs

    def _toggled(self, call: Call) -> Call:
        compiled = torch.compile(modules.traceable(call))
        return lambda *args, **kwargs: (compiled if self._is_compiled else call)(*args, **kwargs)

    def _set(self, *, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        if self._is_own:
            torch.compiler.set_stance("default" if is_compiled else "force_eager")

    def _begin_step(self) -> None:
        self._elements = 0
        self._compiled_before = modules.compilations()
        self._clock.reset_peak()
        self._began_bytes = self._clock.used_bytes()
        self._began_spent_s = self._clock.spent_s()
        self._began_s = self._clock.now_s()


def _middle(values: Any) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _middle_bytes(values: list[int]) -> int | None:
    return int(_middle(values)) if values else None
