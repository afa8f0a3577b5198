"""Follows a training from optimizer step to optimizer step, and ends it when enough was seen."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast.train.tuning.loaders import Loaders
from holdfast.train.tuning.modules import Call, Discovery, Outermost, calls_through, inner


class Enough(BaseException):
    """Ends a rehearsal between two steps; not an Exception, so that no handler of the script keeps it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What the first step has shown of the training."""

    modules: tuple[Outermost, ...]
    optimizer: Optimizer
    device: torch.device

    @property
    def callable(self) -> tuple[Outermost, ...]:
        """The modules whose calls can be stood in for: those that are called outside of compiled code."""
        return tuple(one for one in self.modules if not one.is_compiled_around)


class Watcher(abc.ABC):
    """One question to a training, answered by looking at some of its steps."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """Steps to be looked at, after the first one."""

    @abc.abstractmethod
    def begin(self, scene: Scene) -> None:
        """The first step is done: begin with the next."""

    @abc.abstractmethod
    def called(self, one: Outermost, call: Call) -> Call:
        """What is called instead of a module; `call` is the module's own."""

    @abc.abstractmethod
    def stepped(self, number: int) -> None:
        """Step `number`, from 1, is done."""

    @abc.abstractmethod
    def end(self) -> Any:
        """Undo everything, and say what was seen: a dataclass of `facts`."""


class Probe:
    """Drives a watcher over the steps of whatever trains in this process.

    Args:
        watcher: what looks at the steps.
        loaders: what stands in for the data loaders.
        told: is given the facts when the watcher has seen enough.
    """

    def __init__(self, watcher: Watcher, loaders: Loaders, *, told: Callable[[Any], None]) -> None:
        self._watcher = watcher
        self._loaders = loaders
        self._told = told
        self._discovery: Discovery | None = Discovery()
        self._pacer: int | None = None
        self._number = 0
        self._calls = contextlib.ExitStack()
        self._handle: Any = None
        self.is_done = False

    @property
    def num_stepped(self) -> int:
        """Steps seen so far, the first one included."""
        return 0 if self._pacer is None else self._number + 1

    def start(self) -> None:
        """Begin to watch; nothing of a training needs to be there yet."""
        assert self._discovery is not None
        self._handle = register_optimizer_step_post_hook(self._after_step)
        self._loaders.start()
        self._discovery.start()

    def stop(self) -> None:
        """Stop watching, and tell what was seen if it was not told yet."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        if self._discovery is not None:
            self._discovery.stop()
            self._discovery = None
        self._calls.close()
        if self._pacer is not None:
            self._told(self._watcher.end())
        self._loaders.stop()
        self.is_done = True

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._pacer is None:
            self._begin(optimizer)
            return
        if id(optimizer) != self._pacer:
            return  # a loop of several optimizers makes one step of all of them
        self._number += 1
        self._watcher.stepped(self._number)
        if self._number >= self._watcher.num_steps:
            self.stop()
            raise Enough

    def _begin(self, optimizer: Optimizer) -> None:
        assert self._discovery is not None
        self._pacer = id(optimizer)
        modules = self._discovery.stop()
        self._discovery = None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        scene = Scene(tuple(modules), optimizer, parameters[0].device)
        self._watcher.begin(scene)
        for one in scene.callable:
            target = (
                one.module if isinstance(one.module, torch._dynamo.OptimizedModule) else inner(one.module)
            )
            through = _through(self._watcher, one)
            self._calls.enter_context(calls_through(target, through))


def _through(watcher: Watcher, one: Outermost) -> Callable[[Call], Call]:
    return lambda call: watcher.called(one, call)
