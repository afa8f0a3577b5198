"""Hook that runs before every optimizer step, and the threads that make the steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers  # pyright: ignore[reportAttributeAccessIssue] - torch.optim deletes the name


class StepHook:
    """Calls a method before every optimizer step of this process, before any other hook.

    A hook of all optimizers: those of the state may be stepped through a copy, or their parameters by another
    optimizer. It runs first, because other hooks may write to parameters.

    Args:
        before: called with the optimizer. Only a weak reference to its object is kept.
    """

    def __init__(self, before: Callable[[Optimizer], None]) -> None:
        self._known: dict[int, weakref.ref[Optimizer]] = {}  # by id, which a new optimizer may reuse
        self._last: threading.Thread | None = None  # the last thread that stepped a known optimizer
        method: Any = weakref.WeakMethod(before)  # pyright: ignore[reportArgumentType]
        this = weakref.ref(self)

        # A compiled step() must call it, not trace it: the state differs at each call.
        @torch.compiler.disable
        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            owner, call = this(), method()
            if owner is not None and call is not None:
                if owner.is_known(optimizer):
                    owner._last = threading.current_thread()
                call(optimizer)

        handle = optimizers.register_optimizer_step_pre_hook(hook)
        optimizers._global_optimizer_pre_hooks.move_to_end(handle.id, last=False)
        self._remove = weakref.finalize(self, handle.remove)

    def add_known(self, known: Iterable[Optimizer]) -> None:
        """Register optimizers whose steps change the state."""
        for optimizer in known:
            self._known[id(optimizer)] = weakref.ref(optimizer)

    def is_known(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer was registered."""
        reference = self._known.get(id(optimizer))
        return reference is not None and reference() is optimizer

    def other_thread(self) -> threading.Thread | None:
        """Return the thread of the last registered step if it is alive and another one."""
        last = self._last
        if last is None or last is threading.current_thread() or not last.is_alive():
            return None
        return last

    def remove(self) -> None:
        """Remove the hook."""
        self._remove()
