"""Copies a state into an arena: at once what may change, in the background what an optimizer owns."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.killpoint import kill_point
from holdfast.stage.arena import Arena
from holdfast.stage.plan import Plan

_MANY = 1000  # tensors that one thread copies before another one pays
_MAX_THREADS = 4
_GROUP_BYTES = (
    64 << 20
)  # copied in one call without the interpreter; small enough to see a failing thread early


@dataclass
class Staging:
    """One copy under way."""

    arena: Arena
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    changed: str | None = None  # name of a tensor that changed during the copy: the copy is torn
    copied_event: torch.cuda.Event | None = None  # CUDA: all copies have run on the device
    stepped: bool = False  # CUDA: an optimizer's update is queued behind the copies
    is_frozen_unchanged: bool = False  # frozen tensors were copied beside the training, see `Stager.stage`

    @property
    def torn(self) -> bool:
        """True if the copy may mix two steps and must not be used."""
        return self.changed is not None


class Stager:
    """Runs the copies of one process, one after the other, and makes the optimizers wait for them.

    `waited_s` is the time that optimizers have spent waiting, in all, and `num_steps` how many steps they
    have begun.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.num_steps = 0
        self._current: Staging | None = None
        # By id, with the object itself: an id alone may come back with another optimizer.
        self._hooks: dict[int, tuple[weakref.ref[Optimizer], RemovableHandle]] = {}
        self._thread: threading.Thread | None = None
        # The plan's number, address and version of each frozen tensor at the save before.
        self._frozen: tuple[int, list[tuple[int, int | None]]] | None = None

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Make each optimizer's next steps wait for the copy under way."""
        for optimizer in optimizers:
            known = self._hooks.get(id(optimizer))
            if known is None or known[0]() is not optimizer:
                # A compiled step() must call it, and not trace what it finds: it would find another copy
                # each time.
                before: Any = torch.compiler.disable(self._before_step)
                self._hooks[id(optimizer)] = weakref.ref(optimizer), optimizer.register_step_pre_hook(before)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.num_steps += 1
        staging = self._current
        if staging is None or staging.done.is_set():
            return
        if staging.copied_event is not None:
            # On the device, not here: the update's kernels queue behind the copies, Python goes on.
            staging.stepped = True
            torch.cuda.current_stream().wait_event(staging.copied_event)
            return
        began = time.perf_counter()
        staging.done.wait()
        self.waited_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the copy under way."""
        if self._current is not None:
            self._current.done.wait()

    def stage(
        self,
        plan: Plan,
        tensors: Mapping[str, torch.Tensor],
        arena: Arena,
        *,
        then: Callable[[Staging], None],
    ) -> Staging:
        """Start copying `tensors` into `arena`.

        Returns when all that no optimizer owns is copied, but for frozen tensors that stand where they stood
        at the save before, with the same version: these are copied beside the training too, and the keeper
        proves by their hashes that they had not changed. `then` runs in the background thread when the rest
        is copied too, whether or not that went well.

        Blocks: for the copy of the eager tensors, and for an earlier copy that is still under way.
        """
        self.wait()
        staging = self._current = Staging(arena)
        try:
            self._start(staging, plan, tensors, then)
        except BaseException:  # nothing will copy any more: nobody may wait for it
            staging.done.set()
            self.distrust_frozen()  # no hash of what they were at this save will be there to prove anything
            raise
        return staging

    def _start(
        self,
        staging: Staging,
        plan: Plan,
        tensors: Mapping[str, torch.Tensor],
        then: Callable[[Staging], None],
    ) -> None:
        arena = staging.arena
        live = [tensors[name] for name in plan.names]
        if plan.is_cuda:
            arena.pin()
        views = plan.views(arena)
        staging.is_frozen_unchanged = self._are_frozen_unchanged(plan, [live[i] for i in plan.frozen])
        eager, later = plan.eager, plan.background
        if staging.is_frozen_unchanged:
            later += plan.frozen
        else:
            eager += plan.frozen
        if plan.is_cuda:
            self._start_cuda(staging, eager, later, live, views)
        else:
            _copy_in_threads([views[i] for i in eager], [live[i] for i in eager])
        kill_point("trainer.staging")
        versions = _versions([live[i] for i in later])
        work = _Background(staging, plan, later, live, views, versions, then)
        thread = threading.Thread(target=work.run, name="holdfast-stage", daemon=True)
        thread.start()
        self._thread = thread

    def _start_cuda(
        self,
        staging: Staging,
        eager: tuple[int, ...],
        later: tuple[int, ...],
        live: list[torch.Tensor],
        views: list[torch.Tensor],
    ) -> None:
        """Queue all copies on a side stream; wait here only for the eager ones."""
        stream = _side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            _copy([views[i] for i in eager], [live[i] for i in eager], non_blocking=True)
            eager_done = torch.cuda.Event()
            eager_done.record(stream)
            _copy([views[i] for i in later], [live[i] for i in later], non_blocking=True)
            staging.copied_event = torch.cuda.Event()
            staging.copied_event.record(stream)
        eager_done.synchronize()

    def _are_frozen_unchanged(self, plan: Plan, frozen: list[torch.Tensor]) -> bool:
        before = self._frozen
        places = zip((t.data_ptr() for t in frozen), _versions(frozen), strict=True)
        self._frozen = plan.number, list(places)  # another plan may put them into other places of the file
        return bool(frozen) and self._frozen == before

    def distrust_frozen(self) -> None:
        """Copy frozen tensors at once at the next save: this one failed, perhaps since they had changed."""
        self._frozen = None

    def close(self) -> None:
        """Wait for the copy under way and let go of the optimizers."""
        if self._thread is not None:
            self._thread.join()
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


@dataclass
class _Background:
    """The part of a staging that runs beside training. It holds the tensors, so their memory stays theirs."""

    staging: Staging
    plan: Plan
    indices: tuple[int, ...]  # of what is copied beside the training
    live: list[torch.Tensor]
    views: list[torch.Tensor]
    versions: list[int | None]
    then: Callable[[Staging], None]

    def run(self) -> None:
        staging, indices = self.staging, self.indices
        try:
            if staging.copied_event is not None:
                staging.copied_event.synchronize()
            else:
                with torch.no_grad():
                    for group in _groups(self.live, indices):
                        _copy([self.views[i] for i in group], [self.live[i] for i in group])
            after = _versions([self.live[i] for i in indices])
            if after != self.versions and not staging.stepped:  # a queued step's version bump is no tear
                first = next(i for i, (a, b) in enumerate(zip(self.versions, after, strict=True)) if a != b)
                staging.changed = self.plan.names[indices[first]]
        except Exception as error:  # noqa: BLE001 - any failure of the copy belongs to the save, which raises it
            staging.error = error
        try:
            self.then(staging)
        finally:
            staging.done.set()


def _copy(views: list[torch.Tensor], live: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    if views:
        # One call, without the interpreter lock.
        torch._foreach_copy_(views, live, non_blocking)  # pyright: ignore[reportPrivateImportUsage]


def _copy_in_threads(views: list[torch.Tensor], live: list[torch.Tensor]) -> None:
    """The same, for a caller that waits: what thousands of small tensors cost is not their bytes."""
    share = max(_MANY, -(-len(views) // min(_MAX_THREADS, os.cpu_count() or 1)))
    parts = [(views[i : i + share], live[i : i + share]) for i in range(0, len(views), share)]

    def copy(part: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        with torch.no_grad():  # each thread has its own
            _copy(*part)

    if len(parts) < 2:
        for part in parts:
            copy(part)
        return
    with ThreadPoolExecutor(len(parts) - 1, "holdfast-copy") as others:
        pending = [others.submit(copy, part) for part in parts[1:]]
        copy(parts[0])
        for one in pending:
            one.result()


def _groups(live: list[torch.Tensor], indices: tuple[int, ...]) -> Iterable[list[int]]:
    group: list[int] = []
    num_bytes = 0
    for i in indices:
        group.append(i)
        num_bytes += live[i].nbytes
        if num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _versions(tensors: list[torch.Tensor]) -> list[int | None]:
    # Tensors made in inference mode count no versions; the optimizer's hook is their only guard.
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


_stream: torch.cuda.Stream | None = None


def _side_stream() -> torch.cuda.Stream:
    global _stream
    if _stream is None:
        _stream = torch.cuda.Stream()
    return _stream
