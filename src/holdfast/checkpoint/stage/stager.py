"""Stager: copies a state into an arena, at once or in the background."""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch.optim import Optimizer

from holdfast.checkpoint.stage.arena import Arena
from holdfast.checkpoint.stage.calm import CalmTensors, cancel_all
from holdfast.checkpoint.stage.device_copies import DeviceCopies, copy_all, queue_copies
from holdfast.checkpoint.stage.plan import SavePlan
from holdfast.checkpoint.stage.repeats import Repeats
from holdfast.checkpoint.stage.step_hook import LastStep, StepHook
from holdfast.checkpoint.stage.watch import Watcher, WriteWatch
from holdfast.checkpoint.state.tensors import is_dtensor
from holdfast.errors import InvalidInput
from holdfast.system.failpoint import failpoint
from holdfast.system.process_exit import complete_at_exit

_MANY = 1000  # tensors that one thread copies before another one pays
_MAX_THREADS = 4
_GROUP_BYTES = (
    64 << 20
)  # copied in one call without the interpreter; small enough to see a failing thread early

_NO_WITNESSES: Mapping[int, int] = MappingProxyType({})
_NOTHING = torch.empty(0, device="cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


@dataclass
class Staging:
    """One copy into an arena."""

    arena: Arena
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    changed: tuple[str, ...] = ()  # names of tensors that changed during the copy, which is torn then
    addresses: frozenset[int] = frozenset()  # of the tensors that are copied in the background
    queued: DeviceCopies | None = None  # CUDA: the copies in the background
    counters: VersionCounters | None = None
    is_frozen_unchanged: bool = False  # frozen tensors were copied unwatched, see `Stager.stage`
    torn_witnesses: frozenset[int] = frozenset()  # indices of those whose copies must not be used

    @property
    def torn(self) -> bool:
        """True if the copy may mix two moments and must not be used."""
        return bool(self.changed)


class VersionCounters:
    """PyTorch's version counters of some tensors at the start of the copy.

    PyTorch counts a write after its kernel has run or, on a device, has been queued. It never counts writes
    through `.data` or from outside of PyTorch. So a changed counter proves a write, but an unchanged one
    proves nothing.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = _versions(tensors.values())
        self._changed: set[int] = set()
        self._stepped: set[int] = set()

    def find_changed(self) -> set[int]:
        """Return the indices of written tensors, ignoring steps that wait for the copy."""
        now = _versions(self._tensors.values())
        for index, before, after in zip(self._tensors, self._before, now, strict=True):
            if before != after and index not in self._stepped:
                self._changed.add(index)
        return self._changed

    def begin_step(self, addresses: set[int]) -> None:
        """Expect writes to the tensors at `addresses` from now on, after the copy."""
        self.find_changed()
        self._stepped.update(i for i, tensor in self._tensors.items() if tensor.data_ptr() in addresses)


class Stager:
    """Copies of one process, one after the other. Optimizers wait for them.

    Args:
        optimizers: those of the state that exist already.

    Attributes:
        waited_s: total time that optimizers have waited.
        num_steps: steps that the optimizers of the state have begun.
        repeats: the tensors that are copied before `stage` returns, because a copy of them was torn.
        watcher: proves that tensors did not change while they were copied.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self.waited_s = 0.0
        self.num_steps = 0
        self.repeats = Repeats()
        self.watcher = Watcher(on_busy=cancel_all)
        self._pid = os.getpid()
        self._calm = CalmTensors()
        self._current: Staging | None = None
        self._hook = StepHook(self._before_step)
        self._hook.add_known(optimizers)
        self._steps_checked: Mapping[int, LastStep] = {}  # at the last `check_thread`
        self._thread: threading.Thread | None = None
        self._settling: threading.Thread | None = None
        self._closing = False
        self._is_captured = (
            False  # a step is in a CUDA graph, whose replays call no hook and count no version
        )
        # The plan's number, and address and version of each frozen tensor, at the previous save.
        self._frozen: tuple[int, list[tuple[int, int | None]]] | None = None
        self._frozen_names: frozenset[str] = frozenset()
        self._torn_witnesses: set[str] = set()  # names of those that are copied before `stage` returns
        complete_at_exit(self)

    def guarantee(self, plan: SavePlan) -> str:
        """Return a description of how torn copies of `plan` are detected in this process."""
        if plan.is_cuda:
            return (
                "version counters, as tensors are on a GPU: writes without one (.data) are not detected "
                "before save(...).wait_staged()"
            )
        if self.watcher.refusal is not None:
            return (
                "copying everything before save() returns, as the kernel does not record written pages "
                f"for this process: {self.watcher.refusal}"
            )
        return "the kernel's record of written pages"

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Register the optimizers of the state. The steps of all optimizers wait for a running copy."""
        self._hook.add_known(optimizers)

    def unused_gradients(self) -> list[torch.Tensor]:
        """Return gradients of the state's optimizers that were computed after their last step."""
        return self._hook.unused_gradients()

    def stepped(self) -> list[Optimizer]:
        """Return the optimizers of this process that have begun a step."""
        found = (last.optimizer() for last in self._hook.last_steps().values())
        return [optimizer for optimizer in found if optimizer is not None]

    def check_thread(self) -> None:
        """Raise if another thread than the calling one steps the optimizers of the state.

        `stage` raises if one has begun a step since, with any optimizer of the tensors that it copies.

        Raises:
            InvalidInput: it does, and may change the state at any moment.
        """
        self._steps_checked = self._hook.last_steps()
        self._check_threads(())

    def _check_threads(self, live: Iterable[torch.Tensor]) -> None:
        """Raise if another thread may have changed the state, or one of `live`, since then."""
        others = self._hook.steps_of_other_threads(self._steps_checked)
        if not others:
            return
        storages = _Storages.of(live)
        for last in others:
            optimizer = last.optimizer()
            if optimizer is None:
                continue
            if self._hook.is_known(optimizer) or storages.contain_any(_addresses_of(optimizer)):
                raise InvalidInput(
                    f"save() was called in the thread {threading.current_thread().name!r}, but an optimizer "
                    f"of the state's parameters steps in the thread {last.thread.name!r}, which may change "
                    "the state at any moment. Nothing was saved. Call save() in the thread that trains: it "
                    "returns after a few milliseconds, and the copy runs in the background."
                )

    def _before_step(self, optimizer: Optimizer) -> None:
        if os.getpid() != self._pid:  # a child has no copy to wait for, and its parent's are not its own
            return
        is_known = self._hook.is_known(optimizer)
        self.num_steps += is_known
        if is_known:
            self.watcher.lose_huge_pages(self._calm.end())
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                self._is_captured = True
                return  # nothing runs now, and the capture may not wait for work outside of it
        staging = self._current
        if staging is None or staging.done.is_set():
            return
        if not is_known and staging.addresses.isdisjoint(_addresses_of(optimizer)):
            return
        if staging.queued is not None:
            # On the device, not here: the update's kernels queue behind the copies, Python continues.
            if staging.counters is not None:
                staging.counters.begin_step(_addresses_of(optimizer))
            staging.queued.delay_writes()
            return
        began = time.perf_counter()
        staging.done.wait()
        self.waited_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the running copy, if any."""
        if self._current is not None:
            self._current.done.wait()

    def stage(
        self,
        plan: SavePlan,
        tensors: Mapping[str, torch.Tensor],
        arena: Arena,
        *,
        then: Callable[[Staging], None],
        at_once: bool = False,
        is_lent: bool = False,
        witnesses: Mapping[int, int] = _NO_WITNESSES,
    ) -> Staging:
        """Start to copy `tensors` into `arena`.

        On a CUDA device, whatever is copied "before this returns" is queued on the device, and later work of
        its current stream waits for that.

        A tensor is copied in the background if it is large, can be watched meanwhile, and either is owned by
        an optimizer, or is frozen with the same address and version as at the previous save, or is calm: not
        written before the next step after earlier saves. Everything else is copied before this returns. Such
        frozen tensors that cannot be watched are also copied in the background: the keeper proves by their
        hashes that they have not changed.

        Witnesses are copied by the same rules, after everything else. A torn one does not spoil the save.

        Args:
            arena: of `plan.arena_bytes` or more.
            then: called in the background thread after the copy, successful or not.
            at_once: copy everything before returning.
            is_lent: the caller may write to what no optimizer owns as soon as this returns.
            witnesses: offsets in the arena, by index, of those that are copied too.

        Blocks: for the copy of all that is not copied in the background, and for an earlier copy.
        """
        self.wait()
        self._calm.cancel()
        staging = self._current = Staging(arena)
        free = () if at_once or is_lent or plan.is_cuda else plan.lasting
        try:
            self._start(staging, plan, tensors, then, free, at_once=at_once, witnesses=witnesses)
        except BaseException:  # no thread will wait for the copies, so this does
            if staging.queued is not None:
                staging.queued.wait()
            staging.done.set()
            self.distrust_frozen()  # this save will have no hashes to compare with
            raise
        return staging

    def _start(
        self,
        staging: Staging,
        plan: SavePlan,
        tensors: Mapping[str, torch.Tensor],
        then: Callable[[Staging], None],
        free: tuple[int, ...],
        *,
        at_once: bool,
        witnesses: Mapping[int, int],
    ) -> None:
        """Start as `stage` does. `free` are tensors without an owner that may be calm."""
        live = plan.live(tensors)
        self._frozen_names = frozenset(plan.names[i] for i in plan.frozen)
        if plan.is_cuda:
            staging.arena.pin()
        views = [*plan.views(staging.arena), *_witness_views(plan, live, staging.arena, witnesses)]
        calm = () if at_once else self._calm_witnesses(plan, witnesses)
        watches: tuple[WriteWatch, ...] = ()
        if plan.is_cuda:
            later = (*self._divide_cuda(staging, plan, live, at_once=at_once), *calm)
        else:
            self.watcher.locate(live, plan.large)
            later, watch = self._divide(staging, plan, live, free, at_once=at_once)
            lone = plan.large.difference(self.watcher.overlapping)
            watches = watch, self.watcher.start({i: live[i] for i in calm if i in lone})
            later = (*later, *watches[1].tensors)
        try:
            background = frozenset(later)
            blocking = tuple(i for i in (*range(len(plan.names)), *witnesses) if i not in background)
            # An optimizer knows a tensor, and PyTorch counts its writes, as a whole.
            whole = {i: tensors[plan.live_names[i]] for i in later}
            staging.addresses = frozenset(tensor.data_ptr() for tensor in whole.values())
            staging.counters = VersionCounters(whole)
            changed: set[int] = set()
            if plan.is_cuda:
                _start_cuda(staging, blocking, later, live, views)
            else:
                changed = self._copy_blocking(plan, blocking, live, views, free)
            self._check_threads(live)  # another one may just have begun its first step
            failpoint("trainer.staging")
            work = _Background(self, staging, plan, later, live, views, watches, changed, free, then)
            thread = threading.Thread(target=work.run, name="holdfast-stage", daemon=True)
            thread.start()
        except BaseException:
            for watch in watches:
                watch.cancel()
            raise
        self._thread = thread

    def _calm_witnesses(self, plan: SavePlan, witnesses: Mapping[int, int]) -> tuple[int, ...]:
        """Return the indices of witnesses that may be copied in the background."""
        names, torn = plan.live_names, self._torn_witnesses
        return tuple(
            i
            for i in witnesses
            if i in plan.calm_witnesses and names[i] not in self.repeats and names[i] not in torn
        )

    def note_witnesses(self, plan: SavePlan, torn: Iterable[int]) -> None:
        """Copy torn witnesses before `stage` returns from now on."""
        self._torn_witnesses.update(plan.live_names[i] for i in torn)

    def _divide(
        self,
        staging: Staging,
        plan: SavePlan,
        live: list[torch.Tensor],
        free: tuple[int, ...],
        *,
        at_once: bool,
    ) -> tuple[tuple[int, ...], WriteWatch]:
        """Return the tensors to copy in the background, and the watch over them, already started."""
        names, frozen = plan.names, self._unchanged(plan, live)
        wanted = () if at_once else (*plan.background, *frozen, *self._find_calm(plan, free))
        overlapping = self.watcher.overlapping
        if not overlapping.issubset(wanted):  # all that overlap need one watch
            wanted = [i for i in wanted if i not in overlapping]
        watch = self.watcher.start(
            {i: live[i] for i in wanted if i in plan.large and names[i] not in self.repeats}
        )
        later = set(watch.tensors)
        staging.is_frozen_unchanged = self._may_trust(plan, frozen, watch, at_once=at_once)
        if staging.is_frozen_unchanged:
            later.update(frozen)
        return tuple(sorted(later)), watch

    def _find_calm(self, plan: SavePlan, free: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in free if plan.names[i] in self._calm)

    def _unchanged(self, plan: SavePlan, live: list[torch.Tensor]) -> tuple[int, ...]:
        """Return the frozen tensors if all have the addresses and versions of the previous save."""
        tensors, before = [live[i] for i in plan.frozen], self._frozen
        places = zip((t.data_ptr() for t in tensors), _versions(tensors), strict=True)
        self._frozen = plan.number, list(places)  # another plan may change their positions in the file
        return plan.frozen if self._frozen == before else ()

    def _may_trust(
        self, plan: SavePlan, frozen: tuple[int, ...], watch: WriteWatch | None, *, at_once: bool
    ) -> bool:
        """Return True if unwatched frozen tensors are copied in the background too."""
        watched = () if watch is None else watch.tensors
        unwatched = [i for i in frozen if (i in plan.large or plan.is_cuda) and i not in watched]
        return bool(unwatched) and not at_once and not any(plan.names[i] in self.repeats for i in unwatched)

    def _divide_cuda(
        self, staging: Staging, plan: SavePlan, live: list[torch.Tensor], *, at_once: bool
    ) -> tuple[int, ...]:
        frozen = self._unchanged(plan, live)
        is_free = not at_once and not self._is_captured
        later = (i for i in plan.background if plan.names[i] not in self.repeats) if is_free else ()
        staging.is_frozen_unchanged = self._may_trust(plan, frozen, None, at_once=at_once)
        return (*later, *frozen) if staging.is_frozen_unchanged else tuple(later)

    def _copy_blocking(
        self,
        plan: SavePlan,
        blocking: tuple[int, ...],
        live: list[torch.Tensor],
        views: list[torch.Tensor],
        free: tuple[int, ...],
    ) -> set[int]:
        """Copy while the caller waits; return the indices of tensors that another thread has changed."""
        large = {i: live[i] for i in sorted(plan.large.intersection(blocking))}
        lone = plan.large.difference(self.watcher.overlapping)
        chosen = self._calm.choose(plan.number, {i: plan.names[i] for i in free if i in lone})
        observed = self.watcher.start({i: live[i] for i in chosen})
        watch = self.watcher.start({i: tensor for i, tensor in large.items() if i not in chosen})
        counters = VersionCounters(large)
        try:
            _copy_in_threads([views[i] for i in blocking], [live[i] for i in blocking])
            changed = {*watch.end(views), *observed.find_written(), *counters.find_changed()}
            observed.complete(views)
        except BaseException:
            watch.cancel()
            observed.cancel()
            raise
        self._calm.observe(observed, {i: chosen[i] for i in observed.tensors})
        shared = self.watcher.shared.intersection(blocking)  # writes of other processes show only so
        return changed | {i for i in shared if not _is_equal(views[i], live[i])}

    def distrust_frozen(self, *, for_long: bool = False) -> None:
        """Copy unwatched frozen tensors at once at the next save, because this one failed.

        Args:
            for_long: it failed because they had changed, so also at further saves.
        """
        if for_long:
            self.repeats.record_torn(self._frozen_names)
        self._frozen = None

    def record_torn(self, names: tuple[str, ...]) -> None:
        """Copy tensors before `stage` returns, because a copy of them was torn.

        For some saves, and those without an owner from now on.
        """
        self.repeats.record_torn(names)
        self._calm.record_torn(names)

    def settle(self, plan: SavePlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Move large tensors into huge pages, so that watching them costs almost nothing.

        Blocks: 0.2 to 2 s per GB, the first time; ends early when a save begins.
        """
        live, current = plan.live(tensors), self._current
        if not plan.is_cuda:
            self.watcher.locate(live, plan.large)
            self._settle(plan, live, plan.lasting, current)

    def settle_in_background(self, plan: SavePlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call `settle` in a thread, once. The first save then need not protect small pages.

        Blocks: to locate the tensors in memory.
        """
        if plan.is_cuda or self._settling is not None or self._current is not None:
            return
        live = plan.live(tensors)
        self.watcher.locate(live, plan.large)  # not in the thread: a concurrent save reads the result
        self._settling = threading.Thread(
            target=self._settle, args=(plan, live, plan.lasting, None), name="holdfast-settle", daemon=True
        )
        self._settling.start()

    def _settle(
        self, plan: SavePlan, live: list[torch.Tensor], free: tuple[int, ...], current: Staging | None
    ) -> None:
        observed = self._calm.observed  # protected pages stay small
        settled = [i for i in free if i not in observed]
        large = {i: live[i] for i in (*plan.background, *plan.frozen, *settled) if i in plan.large}
        self.watcher.use_huge_pages(large, until=lambda: self._closing or self._current is not current)

    def end_with_interpreter(self, timeout_s: float) -> None:
        """Complete the running copy, and hand it over."""
        self._join(timeout_s)

    def _join(self, timeout_s: float | None = None) -> None:
        self._closing = True
        for thread in (self._thread, self._settling):
            if thread is not None:
                thread.join(timeout_s)

    def close(self) -> None:
        """Wait for the running copy, and stop making optimizers wait."""
        self._join()
        self._hook.remove()
        self._calm.cancel()
        self.watcher.close()


@dataclass
class _Background:
    """The part of a staging that runs beside training. It keeps the tensors' memory alive."""

    stager: Stager
    staging: Staging
    plan: SavePlan
    indices: tuple[int, ...]  # of the tensors that are copied in the background
    live: list[torch.Tensor]
    views: list[torch.Tensor]
    watches: tuple[WriteWatch, ...]
    changed: set[int]  # during the blocking copy
    free: tuple[int, ...]  # tensors without an owner that may be calm
    then: Callable[[Staging], None]

    def run(self) -> None:
        staging = self.staging
        try:
            try:
                self._copy()
            finally:
                self._find_changed()
        except Exception as error:  # noqa: BLE001 - any failure of the copy belongs to the save, which raises it
            staging.error = error
        try:
            self.then(staging)
        finally:
            staging.done.set()
        if staging.queued is None:
            self.stager._settle(self.plan, self.live, self.free, staging)

    def _copy(self) -> None:
        if self.staging.queued is not None:
            self.staging.queued.wait()
            return
        with torch.no_grad():
            for group in _groups(self.live, self.indices):
                copy_all([self.views[i] for i in group], [self.live[i] for i in group])

    def _find_changed(self) -> None:
        found = self.changed
        for watch in self.watches:
            found |= set(watch.end(self.views))
        if self.staging.counters is not None:
            found |= self.staging.counters.find_changed()
        changed = sorted(i for i in found if i < len(self.plan.names))
        self.staging.torn_witnesses = frozenset(found.difference(changed))
        self.stager.note_witnesses(self.plan, self.staging.torn_witnesses)
        self.staging.changed = tuple(self.plan.names[i] for i in changed)
        if changed:
            self.stager.record_torn(self.staging.changed)
        else:
            self.stager.repeats.record_saved()


def _start_cuda(
    staging: Staging,
    blocking: tuple[int, ...],
    later: tuple[int, ...],
    live: list[torch.Tensor],
    views: list[torch.Tensor],
) -> None:
    """Queue all copies; what the caller writes to `blocking` on a device from now on waits for them."""
    staging.queued = queue_copies([views[i] for i in blocking], [live[i] for i in blocking])
    staging.queued.delay_writes()
    rest = queue_copies([views[i] for i in later], [live[i] for i in later])
    staging.queued = staging.queued.followed_by(rest)


def _witness_views(
    plan: SavePlan, live: Sequence[torch.Tensor], arena: Arena, witnesses: Mapping[int, int]
) -> Iterable[torch.Tensor]:
    """Yield the copies of all witnesses in an arena; an empty tensor for those that are not copied."""
    for index in range(len(plan.names), len(live)):
        tensor, at = live[index], witnesses.get(index)
        if at is None:
            yield _NOTHING
        else:
            yield arena.bytes[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class _Storages:
    """Memory of the storages of some tensors: sorted first addresses, and the ends of the same storages."""

    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> _Storages:
        """Return the storages of tensors."""
        found = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}
        starts = sorted(found)
        return cls(starts, [start + found[start] for start in starts])

    def contain_any(self, addresses: Iterable[int]) -> bool:
        """Return True if one of the addresses is in a storage."""
        places = ((bisect.bisect_right(self.starts, at) - 1, at) for at in addresses)
        return any(i >= 0 and at < self.stops[i] for i, at in places)


def _addresses_of(optimizer: Optimizer) -> set[int]:
    """Return the addresses of an optimizer's parameters and state tensors on this rank."""
    found = set()
    for group in optimizer.param_groups:
        found.update(map(_address_of, group["params"]))
    for slots in list(optimizer.state.values()):
        if isinstance(slots, dict):
            # A list, as the optimizer may add slots in another thread.
            found.update(_address_of(t) for t in list(slots.values()) if isinstance(t, torch.Tensor))
    return found


def _address_of(tensor: torch.Tensor) -> int:
    if type(tensor) not in _PLAIN and is_dtensor(tensor):
        tensor = tensor._local_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.data_ptr()


def _is_equal(copy: torch.Tensor, live: torch.Tensor) -> bool:
    """Return True if a copy has exactly the bytes of a CPU tensor."""
    if not live.is_contiguous() or live.is_conj() or live.is_neg():
        live = live.resolve_conj().resolve_neg().contiguous()
    return not _libc.memcmp(copy.data_ptr(), live.data_ptr(), live.nbytes)


def _copy_in_threads(views: list[torch.Tensor], live: list[torch.Tensor]) -> None:
    """Copy as `copy_all` does, in several threads. Thousands of small tensors cost more than their bytes."""
    share = max(_MANY, -(-len(views) // min(_MAX_THREADS, os.cpu_count() or 1)))
    parts = [(views[i : i + share], live[i : i + share]) for i in range(0, len(views), share)]

    def copy_part(part: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        with torch.no_grad():  # each thread has its own
            copy_all(*part)

    if len(parts) < 2:
        for part in parts:
            copy_part(part)
        return
    with ThreadPoolExecutor(len(parts) - 1, "holdfast-copy") as others:
        pending = [others.submit(copy_part, part) for part in parts[1:]]
        copy_part(parts[0])
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


def _versions(tensors: Iterable[torch.Tensor]) -> list[int | None]:
    # Tensors made in inference mode do not count versions.
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]
