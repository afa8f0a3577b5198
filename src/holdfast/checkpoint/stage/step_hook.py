"""Hook that runs before every optimizer step, the threads that make the steps, and the memory they change."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from msgspec import Struct
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers  # pyright: ignore[reportAttributeAccessIssue] - torch.optim deletes the name

from holdfast.checkpoint.state.tensors import PLAIN, is_dtensor
from holdfast.errors import InvalidInput

_hooks: set[int] = set()
"""Ids of the hooks of all StepHooks."""


class LastStep(Struct, frozen=True):
    """Last step that an optimizer has begun."""

    optimizer: weakref.ref[Optimizer]
    thread: threading.Thread
    gradient: tuple[int, int] | None  # id and version of one gradient that it uses


_untraced: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""`torch.compiler.disable`, in the form that imports torch._dynamo at the first step instead of at once.

That import takes a second. Each optimizer does it anyway, so a step finds it done, and a state without an
optimizer needs none."""
_Foreign = threading._DummyThread  # pyright: ignore[reportPrivateUsage] - the only sign of Python's own


class StepHook:
    """Calls a method before every optimizer of this process changes its parameters.

    A hook of all optimizers: those of the state may be stepped through a copy, or their parameters by another
    optimizer. It runs before any other hook, because those may write to parameters. If a step has a closure,
    as Lightning's have, the method is called after the closure, so that forward and backward run beside a
    copy. This holds for the optimizers of torch.optim, which call it before they change anything. Only a weak
    reference to the method's object is kept.
    """

    def __init__(self, before: Callable[[Optimizer], None]) -> None:
        self._known: dict[int, weakref.ref[Optimizer]] = {}  # by id, which a new optimizer may reuse
        self._last_steps: dict[int, LastStep] = {}  # by id of an optimizer that exists
        self._checked: dict[int, LastStep] = {}  # at the last check of the threads
        method: Any = weakref.WeakMethod(before)  # pyright: ignore[reportArgumentType]
        this = weakref.ref(self)

        # A compiled step() must call it, not trace it: the state differs at each call.
        def before_update(optimizer: Optimizer) -> None:
            owner, bound = this(), method()
            if owner is not None and bound is not None:
                owner._record(optimizer)
                bound(optimizer)

        call: Any = _untraced(before_update)

        @_untraced
        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closure = _closure_of(optimizer, args, kwargs)
            if closure is None:
                call(optimizer)
                return None

            def closure_then_call() -> Any:
                result = closure()
                call(optimizer)
                return result

            return (optimizer,), {"closure": closure_then_call}

        handle = optimizers.register_optimizer_step_pre_hook(hook)
        optimizers._global_optimizer_pre_hooks.move_to_end(handle.id, last=False)
        _hooks.add(handle.id)
        self._remove = weakref.finalize(self, _remove, handle)

    def add_known(self, known: Iterable[Optimizer]) -> None:
        """Register optimizers whose steps change the state."""
        for optimizer in known:
            self._known[id(optimizer)] = weakref.ref(optimizer)

    def is_known(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer was registered."""
        reference = self._known.get(id(optimizer))
        return reference is not None and reference() is optimizer

    def stepped(self) -> list[Optimizer]:
        """Return the optimizers of this process that have begun a step."""
        found = [last.optimizer() for last in list(self._last_steps.values())]
        return [optimizer for optimizer in found if optimizer is not None]

    def check_threads(self, live: Iterable[torch.Tensor] | None = None) -> None:
        """Raise if another thread than the calling one steps the registered optimizers.

        Threads that Python did not start are left out. On CUDA, hooks of gradients that step an optimizer run
        in a thread of autograd, which works only while its caller waits in `backward`, and never ends.

        Any optimizer of `live` tensors, which are copied, counts too. Without them, the check begins a save.
        Steps of threads that had ended by then do not count.
        """
        this = threading.current_thread()
        if live is None:
            self._checked = dict(self._last_steps)
        for key, last in list(self._last_steps.items()):
            if last.thread is this or isinstance(last.thread, _Foreign):
                continue
            if self._checked.get(key) is last and not last.thread.is_alive():
                continue
            if (optimizer := last.optimizer()) is None:
                continue
            if self.is_known(optimizer) or _are_any_in(addresses_of(optimizer), live or ()):
                raise InvalidInput(
                    f"save() was called in the thread {this.name!r}, but an optimizer "
                    f"of the state's parameters steps in the thread {last.thread.name!r}, which may change "
                    "the state at any moment. Nothing was saved. Call save() in the thread that trains: it "
                    "returns after a few milliseconds, and the copy runs in the background."
                )

    def _record(self, optimizer: Optimizer) -> None:
        """Record the thread of a step until the optimizer's object is deleted."""
        key, steps = id(optimizer), self._last_steps
        if (before := steps.get(key)) is not None:
            reference = before.optimizer
        else:
            reference = weakref.ref(optimizer, lambda _: steps.pop(key, None))
        gradient = next(_gradients(optimizer), None)
        steps[key] = LastStep(reference, threading.current_thread(), _identity(gradient))

    def unused_gradients(self) -> list[torch.Tensor]:
        """Return gradients of registered optimizers that are newer than their last step."""
        found: list[torch.Tensor] = []
        for key, reference in self._known.items():
            if (optimizer := reference()) is None:
                continue
            gradients, last = list(_gradients(optimizer)), self._last_steps.get(key)
            if gradients and last is not None and last.gradient != _identity(gradients[0]):
                found += gradients
        return found

    def remove(self) -> None:
        """Remove the hook."""
        self._remove()


def _gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _identity(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    if gradient is None or gradient.is_inference():
        return None
    return id(gradient), gradient._version


def _remove(handle: Any) -> None:
    _hooks.discard(handle.id)
    handle.remove()


def _closure_of(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return the closure of a step if it runs before any change to parameters; otherwise None."""
    if len(args) + len(kwargs) != 2 or (len(args) == 1 and "closure" not in kwargs):
        return None
    closure = kwargs["closure"] if len(args) == 1 else args[1]
    is_first = type(optimizer).__module__.startswith("torch.optim.")
    of_all = optimizers._global_optimizer_pre_hooks
    has_other_hooks = optimizer._optimizer_step_pre_hooks or not _hooks.issuperset(of_all)
    return closure if callable(closure) and is_first and not has_other_hooks else None


def _are_any_in(addresses: Iterable[int], tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if one of the addresses is in the storage of one of the tensors."""
    stops = {
        one.data_ptr(): one.data_ptr() + one.nbytes() for one in map(torch.Tensor.untyped_storage, tensors)
    }
    starts = sorted(stops)
    before = ((bisect.bisect_right(starts, at) - 1, at) for at in addresses)
    return any(i >= 0 and at < stops[starts[i]] for i, at in before)


def addresses_of(optimizer: Optimizer) -> set[int]:
    """Return the addresses of an optimizer's parameters and state tensors on this rank."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for slots in list(optimizer.state.values()):  # lists, as the optimizer may add slots in another thread
        if isinstance(slots, dict):
            found += [one for one in list(slots.values()) if isinstance(one, torch.Tensor)]
    local = [one._local_tensor if type(one) not in PLAIN and is_dtensor(one) else one for one in found]
    return {one.data_ptr() for one in local}
