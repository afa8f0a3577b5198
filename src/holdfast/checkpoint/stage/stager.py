"""Stager: copies a state into an arena, at once or in the background; what is rarely written comes last."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch.optim import Optimizer

from holdfast.checkpoint.stage.arena import Arena
from holdfast.checkpoint.stage.device_copies import DeviceCopies, copy_all, queue_copies
from holdfast.checkpoint.stage.plan import SavePlan
from holdfast.checkpoint.stage.step_hook import StepHook, addresses_of
from holdfast.checkpoint.stage.watch import Watcher, WriteWatch
from holdfast.checkpoint.state.tensors import versions
from holdfast.system.failpoint import failpoint
from holdfast.system.process_exit import complete_at_exit

_all: weakref.WeakSet[CalmTensors] = weakref.WeakSet()
_ENOUGH = 2
"""Observations in a row without a write, after which a tensor is calm."""


class CalmTensors:
    """Names of tensors that are written only after a step, such as averages of weights.

    An optimizer waits for the background copies before its step, so a tensor that is never written earlier
    need not be copied before a save returns. After the 1st, 2nd, 4th, 8th, ... save, the kernel's record of
    writes continues until the next step of an optimizer of the state. A tensor without a write in two such
    observations in a row is calm. If a background copy of it is torn, it never is again.
    """

    def __init__(self) -> None:
        self._num_quiet: dict[str, int] = {}  # observations in a row without a write, by name
        self.torn: set[str] = set()  # by name; without an owner here, never copied in the background again
        self._plan: object = None
        self._num_saves = 0  # with this plan
        self._watch: WriteWatch | None = None
        self._observed: Mapping[int, str] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()  # another thread may step while this one saves or closes
        _all.add(self)

    def __contains__(self, name: str) -> bool:
        return self._num_quiet.get(name, 0) >= _ENOUGH

    @property
    def observed(self) -> Collection[int]:
        """Indices of the tensors that are being observed."""
        return () if self._watch is None else self._observed

    def choose(self, plan: object, names: Mapping[int, str]) -> Mapping[int, str]:
        """Count a save, and return the tensors to observe after it. A new plan begins the series again.

        The names are those of tensors that no optimizer owns and that can be watched, by index.
        """
        if plan is not self._plan:
            self._plan, self._num_saves = plan, 0
        self._num_saves += 1
        if self._num_saves & (self._num_saves - 1):
            return {}
        return {i: name for i, name in names.items() if name not in self and name not in self.torn}

    def observe(self, watch: WriteWatch, names: Mapping[int, str]) -> None:
        """Observe the tensors of a watch, which ends with the observation, until `end` or `cancel`."""
        # Without the tensors themselves: training may release them.
        self._watch, self._observed = replace(watch, tensors={}, edges=None), names

    def end(self) -> list[int]:
        """End the observation, if there is one, at a step. Return the indices of tensors that were written.

        Blocks: 5 to 60 ms per GB in pages of 4 KiB.
        """
        written = self._stop(WriteWatch.end)
        if written is None:
            return []
        for index, name in self._observed.items():
            self._num_quiet[name] = 0 if index in written else self._num_quiet.get(name, 0) + 1
        return written

    def cancel(self) -> None:
        """End the observation, if there is one, without a result."""
        self._stop(WriteWatch.cancel)

    def _stop(self, how: Callable[[WriteWatch], list[int] | None]) -> list[int] | None:
        if self._watch is None or os.getpid() != self._pid:  # a child's is that of its parent
            return None
        with self._lock:
            watch, self._watch = self._watch, None
            return None if watch is None else how(watch)

    def record_torn(self, names: Iterable[str]) -> None:
        """Record tensors that were written while they were copied in the background."""
        for name in names:
            if self._num_quiet.pop(name, None) is not None:
                self.torn.add(name)


def cancel_all() -> None:
    """End the observations of all stagers of this process: memory can be watched by one only."""
    for calm in list(_all):
        calm.cancel()


_FIRST_SAVES = 8
_MAX_SAVES = 1 << 20


class Repeats:
    """Chooses the tensors that the next save copies before it returns, after a torn copy.

    After a first tear these are the tensors that were written; if another save is torn meanwhile, all of
    them. This lasts for 8 saves, and after each further tear for twice as many: a loop that writes to tensors
    once is slowed down briefly, one that always does keeps its saves.
    """

    def __init__(self) -> None:
        self.num_torn = 0
        self._names: frozenset[str] = frozenset()
        self._are_all = False
        self._saves_left = 0

    def record_torn(self, names: Iterable[str]) -> None:
        """Count a save that was torn, as some tensors were written during its copy."""
        if self._saves_left:
            self._are_all = True
        self._names |= frozenset(names)
        self._saves_left = min(_FIRST_SAVES << self.num_torn, _MAX_SAVES)
        self.num_torn += 1

    def record_torn_elsewhere(self) -> None:
        """Count a save that was torn on another rank; the next saves copy everything before returning."""
        # Otherwise each rank would be torn by itself at another save, and none would be complete (note 013).
        self.record_torn(())
        self._are_all = True

    def record_saved(self) -> None:
        """Count a save that was not torn."""
        self._saves_left = max(0, self._saves_left - 1)
        if not self._saves_left:
            self._names, self._are_all = frozenset(), False

    def __contains__(self, name: str) -> bool:
        return self._are_all or name in self._names

    def __bool__(self) -> bool:
        return self._saves_left > 0


class VersionCounters:
    """PyTorch's version counters of some tensors at the start of the copy.

    PyTorch counts a write after its kernel has run or, on a device, has been queued. It never counts writes
    through `.data` or from outside of PyTorch. So a changed counter proves a write, but an unchanged one
    proves nothing.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = versions(tensors.values())
        self._changed: set[int] = set()
        self._stepped: set[int] = set()

    def find_changed(self) -> set[int]:
        """Return the indices of written tensors, ignoring steps that wait for the copy."""
        now = versions(self._tensors.values())
        for index, before, after in zip(self._tensors, self._before, now, strict=True):
            if before != after and index not in self._stepped:
                self._changed.add(index)
        return self._changed

    def begin_step(self, addresses: set[int]) -> None:
        """Expect writes to the tensors at `addresses` from now on, after the copy."""
        self.find_changed()
        self._stepped.update(i for i, tensor in self._tensors.items() if tensor.data_ptr() in addresses)


_MANY = 1000  # tensors that one thread copies before another one pays
_MAX_THREADS = 4
_GROUP_BYTES = 64 << 20  # in one call without the interpreter; small enough to see a failing thread early
_NO_WITNESSES: Mapping[int, int] = MappingProxyType({})
_NOTHING = torch.empty(0, device="cpu")

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Staging(Struct, dict=True):
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


class Stager:
    """Copies of one process, one after the other. Optimizers, also those of the state, wait for them."""

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self.waited_s = 0.0  # total time that optimizers have waited
        self.num_steps = 0  # that the optimizers of the state have begun
        self.repeats = Repeats()  # tensors that are copied before `stage` returns, as a copy was torn
        self.watcher = Watcher(on_busy=cancel_all)  # proves that tensors did not change while copied
        self._pid = os.getpid()
        self.calm = CalmTensors()
        self._current: Staging | None = None
        self.hook = StepHook(self._before_step)
        self.hook.add_known(optimizers)
        self._thread: threading.Thread | None = None
        self._settling: threading.Thread | None = None
        self._closing = False
        self._is_captured = False  # a step is in a CUDA graph
        self._plan: SavePlan | None = None  # of the previous save
        self._frozen: list[tuple[int, int | None]] | None = None  # address and version of each frozen tensor
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

    def _before_step(self, optimizer: Optimizer) -> None:
        if os.getpid() != self._pid:  # a child has no copy to wait for, and its parent's are not its own
            return
        is_known = self.hook.is_known(optimizer)
        self.num_steps += is_known
        if is_known:
            if written := self.calm.end():
                self.watcher.lose_huge_pages(written)
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                self._is_captured = True
                return  # nothing runs now, and the capture may not wait for work outside of it
        staging = self._current
        if staging is None or staging.done.is_set():
            return
        if not is_known and staging.addresses.isdisjoint(addresses_of(optimizer)):
            return
        if staging.queued is not None:
            # On the device, not here: the update's kernels queue behind the copies, Python continues.
            if staging.counters is not None:
                staging.counters.begin_step(addresses_of(optimizer))
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
        self.calm.cancel()
        staging = self._current = Staging(arena)
        copy = _Copy(self, staging, plan, tensors, witnesses, then, at_once=at_once)
        copy.free = () if at_once or is_lent or plan.is_cuda else plan.lasting
        try:
            copy.live += plan.live(tensors)
            self._divide(copy)
            self._start(copy)
        except BaseException:  # no thread will end the watches or wait for the copies, so this does
            for watch in copy.watches:
                watch.cancel()
            if staging.queued is not None:
                staging.queued.wait()
            staging.done.set()
            self.distrust_frozen()  # this save will have no hashes to compare with
            raise
        return staging

    def _divide(self, copy: _Copy) -> None:
        """Choose the tensors to copy in the background, and start the watches over them.

        The watches begin before anything is copied: a write that no watch sees would tear a copy (note 013).
        """
        plan, live, repeats = copy.plan, copy.live, self.repeats
        names, frozen = plan.live_names, self._unchanged(plan, live)
        if plan.is_cuda:
            # The replay of a CUDA graph calls no hook and counts no version, so a step in one would tear.
            is_excluded = copy.at_once or self._is_captured
            copy.later = [i for i in plan.background if not is_excluded and names[i] not in repeats]
        else:
            self.watcher.locate(live, plan.large)
            wanted = [*plan.background, *frozen, *(i for i in copy.free if names[i] in self.calm)]
            overlapping = self.watcher.overlapping
            if copy.at_once:
                wanted = []
            elif not overlapping.issubset(wanted):  # all that overlap need one watch (note 013)
                wanted = [i for i in wanted if i not in overlapping]
            copy.later = copy.watch([i for i in wanted if i in plan.large and names[i] not in repeats])
        later = frozenset(copy.later)
        unwatched = [i for i in frozen if (plan.is_cuda or i in plan.large) and i not in later]
        if unwatched and not copy.at_once and not any(names[i] in repeats for i in unwatched):
            copy.staging.is_frozen_unchanged = True
            copy.later += set(frozen).difference(later)
        copy.later.sort()
        if copy.at_once:
            return
        calm = [i for i in copy.witnesses if i in plan.calm_witnesses]
        calm = [i for i in calm if names[i] not in repeats and names[i] not in self.calm.torn]
        if not plan.is_cuda:
            calm = copy.watch([i for i in calm if i in plan.large and i not in self.watcher.overlapping])
        copy.later += calm

    def _unchanged(self, plan: SavePlan, live: list[torch.Tensor]) -> tuple[int, ...]:
        """Return the frozen tensors if all have the addresses and versions of the previous save."""
        tensors, before = [live[i] for i in plan.frozen], self._frozen
        places = zip(map(torch.Tensor.data_ptr, tensors), versions(tensors), strict=True)
        is_same_plan, self._plan = self._plan is plan, plan  # another one may change their positions
        self._frozen = list(places)
        return plan.frozen if is_same_plan and self._frozen == before else ()

    def _start(self, copy: _Copy) -> None:
        """Copy what is not copied in the background, and start the thread for the rest."""
        plan, staging, names = copy.plan, copy.staging, copy.plan.live_names
        if plan.is_cuda:
            staging.arena.pin()
        copy.views += plan.views(staging.arena)
        for index in range(len(plan.names), len(copy.live)):  # an empty one for those that are not copied
            tensor, at = copy.live[index], copy.witnesses.get(index)
            place = None if at is None else staging.arena.bytes[at : at + tensor.nbytes]
            copy.views.append(_NOTHING if place is None else place.view(tensor.dtype).view(tensor.shape))
        later = frozenset(copy.later)
        blocking = [i for i in (*range(len(plan.names)), *copy.witnesses) if i not in later]
        # An optimizer knows a tensor, and PyTorch counts its writes, as a whole.
        whole = {i: copy.tensors[names[i]] for i in copy.later}
        staging.addresses = frozenset(map(torch.Tensor.data_ptr, whole.values()))
        staging.counters = VersionCounters(whole)
        if plan.is_cuda:
            # The current stream waits for the first ones only, an optimizer's step for all.
            staging.queued = queue_copies(*copy.pairs(blocking))
            staging.queued.delay_writes()
            staging.queued = staging.queued.followed_by(queue_copies(*copy.pairs(copy.later)))
        else:
            copy.changed = self._copy_blocking(copy, blocking)
        self.hook.check_threads(copy.live)  # another one may just have begun its first step
        failpoint("trainer.staging")
        thread = threading.Thread(target=copy.run, name="holdfast-stage", daemon=True)
        thread.start()
        self._thread = thread

    def _copy_blocking(self, copy: _Copy, blocking: list[int]) -> set[int]:
        """Copy while the caller waits; return the indices of tensors that another thread has changed."""
        plan, live, watcher = copy.plan, copy.live, self.watcher
        lone = plan.large.difference(watcher.overlapping)
        chosen = self.calm.choose(plan, {i: plan.names[i] for i in copy.free if i in lone})
        large = {i: live[i] for i in sorted(plan.large.intersection(blocking))}
        observed = watcher.start({i: live[i] for i in chosen})
        watch = watcher.start({i: tensor for i, tensor in large.items() if i not in chosen})
        counters = VersionCounters(large)
        try:
            _copy_in_threads(*copy.pairs(blocking))
            changed = {*watch.end(copy.views), *observed.end(copy.views, continues=True)}
            changed |= counters.find_changed()
        except BaseException:
            watch.cancel()
            observed.cancel()
            raise
        if observed.tensors:
            self.calm.observe(observed, {i: chosen[i] for i in observed.tensors})
        shared = watcher.shared.intersection(blocking)  # writes of other processes show only so (note 013)
        return changed | {i for i in shared if not _is_equal(copy.views[i], live[i])}

    def distrust_frozen(self, *, for_long: bool = False) -> None:
        """Copy unwatched frozen tensors at once at the next save, because this one failed.

        If `for_long`, it failed because they had changed, so also at further saves.
        """
        if for_long and (plan := self._plan) is not None:
            self.repeats.record_torn([plan.names[i] for i in plan.frozen])
        self._frozen = None

    def settle(
        self, plan: SavePlan, tensors: Mapping[str, torch.Tensor], *, in_background: bool = False
    ) -> None:
        """Move large tensors into huge pages, so that watching them costs almost nothing.

        In the background it runs once, and only before the first save.

        Blocks: 0.2 to 2 s per GB, the first time; ends early when a save begins.
        """
        if plan.is_cuda or (in_background and (self._settling or self._current) is not None):
            return
        live = plan.live(tensors)
        self.watcher.locate(live, plan.large)  # not in the thread: a concurrent save reads the result
        settle = partial(self.settle_located, plan, live, plan.lasting, self._current)
        if in_background:
            self._settling = threading.Thread(target=settle, name="holdfast-settle", daemon=True)
            self._settling.start()
        else:
            settle()

    def settle_located(
        self, plan: SavePlan, live: list[torch.Tensor], free: tuple[int, ...], current: Staging | None
    ) -> None:
        """Continue `settle` after the tensors were located, until another copy than `current` runs."""
        observed = self.calm.observed  # protected pages stay small
        wanted = [*plan.background, *plan.frozen, *(i for i in free if i not in observed)]
        large = {i: live[i] for i in wanted if i in plan.large}
        self.watcher.use_huge_pages(large, until=lambda: self._closing or self._current is not current)

    def end_with_interpreter(self, timeout_s: float | None) -> None:
        """Complete the running copy, and hand it over."""
        self._closing = True
        for thread in (self._thread, self._settling):
            if thread is not None:
                thread.join(timeout_s)

    def close(self) -> None:
        """Wait for the running copy, and stop making optimizers wait."""
        self.end_with_interpreter(None)
        self.hook.remove()
        self.calm.cancel()
        self.watcher.close()


class _Copy(Struct, dict=True):
    """The copy of one save, whose tensors have the indices of its plan. It keeps their memory alive."""

    stager: Stager
    staging: Staging
    plan: SavePlan
    tensors: Mapping[str, torch.Tensor]  # by name, whole
    witnesses: Mapping[int, int]  # offsets in the arena by index, of those that are copied
    then: Callable[[Staging], None]
    at_once: bool
    live: list[torch.Tensor] = []  # what is copied, by index
    free: tuple[int, ...] = ()  # tensors without an owner that may be calm
    views: list[torch.Tensor] = []  # copies in the arena, by index
    later: list[int] = []  # tensors that are copied in the background
    watches: list[WriteWatch] = []  # over these
    changed: set[int] = set()  # during the blocking copy

    def watch(self, indices: Iterable[int]) -> list[int]:
        """Watch tensors until the end of the copy; return those that can be watched."""
        watch = self.stager.watcher.start({i: self.live[i] for i in indices})
        self.watches.append(watch)
        return list(watch.tensors)

    def pairs(self, indices: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the copies of tensors, and the live ones."""
        return [self.views[i] for i in indices], [self.live[i] for i in indices]

    def run(self) -> None:
        """Copy beside training, and hand the copy over."""
        staging = self.staging
        try:
            try:
                if staging.queued is not None:
                    staging.queued.wait()
                else:
                    self._copy_groups()
            finally:
                self._find_changed()
        except Exception as error:  # noqa: BLE001 - any failure of the copy belongs to the save, which raises it
            staging.error = error
        try:
            self.then(staging)
        finally:
            staging.done.set()
        if staging.queued is None:
            self.stager.settle_located(self.plan, self.live, self.free, staging)

    def _copy_groups(self) -> None:
        with torch.no_grad():
            group: list[int] = []
            num_bytes = 0
            for i in self.later:
                group.append(i)
                num_bytes += self.live[i].nbytes
                if num_bytes >= _GROUP_BYTES or i == self.later[-1]:
                    copy_all(*self.pairs(group))
                    group, num_bytes = [], 0

    def _find_changed(self) -> None:
        found, staging, names = self.changed, self.staging, self.plan.names
        for watch in self.watches:
            found.update(watch.end(self.views))
        if staging.counters is not None:
            found |= staging.counters.find_changed()
        changed = sorted(i for i in found if i < len(names))
        staging.torn_witnesses = frozenset(found.difference(changed))
        self.stager.calm.torn.update(self.plan.live_names[i] for i in staging.torn_witnesses)
        staging.changed = tuple(names[i] for i in changed)
        if changed:
            self.stager.repeats.record_torn(staging.changed)
            self.stager.calm.record_torn(staging.changed)
        else:
            self.stager.repeats.record_saved()


def _is_equal(copy: torch.Tensor, live: torch.Tensor) -> bool:
    """Return True if a copy has exactly the bytes of a CPU tensor."""
    if not live.is_contiguous() or live.is_conj() or live.is_neg():
        live = live.resolve_conj().resolve_neg().contiguous()
    return not _libc.memcmp(copy.data_ptr(), live.data_ptr(), live.nbytes)


def _copy_in_threads(views: list[torch.Tensor], live: list[torch.Tensor]) -> None:
    """Copy as `copy_all` does, in several threads. Thousands of small tensors cost more than their bytes."""
    share = max(_MANY, -(-len(views) // min(_MAX_THREADS, os.cpu_count() or 1)))
    if len(views) <= share:
        with torch.no_grad():
            copy_all(views, live)
        return

    def copy_part(start: int) -> None:
        with torch.no_grad():  # each thread has its own
            copy_all(views[start : start + share], live[start : start + share])

    first, *others = range(0, len(views), share)
    with ThreadPoolExecutor(len(others), "holdfast-copy") as pool:
        pending = [pool.submit(copy_part, start) for start in others]
        copy_part(first)
        for part in pending:
            part.result()
