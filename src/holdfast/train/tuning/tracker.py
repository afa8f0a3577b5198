"""Tracker of a training's optimizer steps, which drives a watcher and stops the run afterwards."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast.train.tuning.loaders import LoaderMonitor
from holdfast.train.tuning.modules import Call, ModuleDiscovery, OutermostModule, intercept_calls, unwrap


class StopRun(BaseException):
    """Request to end a run between two steps. Not an Exception, so the script's handlers do not catch it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingInfo:
    """Facts about the training from its first step."""

    modules: tuple[OutermostModule, ...]
    optimizer: Optimizer
    device: torch.device

    @property
    def interceptable(self) -> tuple[OutermostModule, ...]:
        """The modules whose calls can be intercepted: those called outside of compiled code."""
        return tuple(one for one in self.modules if not one.is_compiled_around)


class StepWatcher(abc.ABC):
    """Measurement of some steps of a training, for one question."""

    num_steps: int
    """Number of steps to watch, after the first one."""

    @abc.abstractmethod
    def begin(self, training: TrainingInfo) -> None:
        """Start watching with the next step."""

    @abc.abstractmethod
    def intercept(self, one: OutermostModule, call: Call) -> Call:
        """Return the function to call instead of the module's own `call`."""

    @abc.abstractmethod
    def step_done(self, number: int) -> None:
        """Record the end of step `number`, counted from 1."""

    @abc.abstractmethod
    def end(self) -> Any:
        """Stop watching, and return the measurements: a dataclass of `measurements`."""


class StepTracker:
    """Tracker that drives a watcher over the optimizer steps of this process.

    Args:
        on_result: receives the measurements once the watcher has enough.
    """

    def __init__(
        self, watcher: StepWatcher, loaders: LoaderMonitor, *, on_result: Callable[[Any], None]
    ) -> None:
        self._watcher = watcher
        self._loaders = loaders
        self._on_result = on_result
        self._discovery: ModuleDiscovery | None = ModuleDiscovery()
        self._pacer: int | None = None
        self._number = 0
        self._calls = contextlib.ExitStack()
        self._handle: Any = None
        self.is_done = False

    @property
    def num_stepped(self) -> int:
        """Steps so far, including the first one."""
        return 0 if self._pacer is None else self._number + 1

    def start(self) -> None:
        """Start tracking. The training need not exist yet."""
        assert self._discovery is not None
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._loaders.start()
        self._discovery.start()

    def stop(self) -> None:
        """Stop tracking, and pass on the measurements if that has not happened."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._discovery is not None:
            self._discovery.stop()
            self._discovery = None
        self._calls.close()
        if self._pacer is not None:
            self._on_result(self._watcher.end())
        self._loaders.stop()
        self.is_done = True

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._pacer is None:
            self._begin(optimizer)
            return
        if id(optimizer) != self._pacer:
            return  # with several optimizers, one of them marks the steps
        self._number += 1
        self._watcher.step_done(self._number)
        if self._number >= self._watcher.num_steps:
            self.stop()
            raise StopRun

    def _begin(self, optimizer: Optimizer) -> None:
        assert self._discovery is not None
        self._pacer = id(optimizer)
        modules = self._discovery.stop()
        self._discovery = None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        training = TrainingInfo(tuple(modules), optimizer, parameters[0].device)
        self._watcher.begin(training)
        for one in training.interceptable:
            target = (
                one.module if isinstance(one.module, torch._dynamo.OptimizedModule) else unwrap(one.module)
            )
            self._calls.enter_context(
                intercept_calls(target, functools.partial(self._watcher.intercept, one))
            )
