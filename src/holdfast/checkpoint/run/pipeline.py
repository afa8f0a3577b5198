"""Pipeline of a save: capture the state, plan its files, copy it into an arena, submit it to the keeper."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.keeper import ArenaLayout, Keeper, Save
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.run.metrics import MetricsBuffer
from holdfast.checkpoint.run.watching import Watching
from holdfast.checkpoint.stage import Arena, Arenas, SavePlan, Stager, Staging, aligned
from holdfast.checkpoint.state import CapturedState, State, catalog_of, shared_tensors
from holdfast.errors import HoldfastError, InvalidInput, RetryLater
from holdfast.system.failpoint import failpoint
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.units import plural

_log = get_logger("checkpoint.run")
MIN_ARENAS_WITH_PEERS = 3
"""Arenas of a run with peers: that of the newest step which all peers hold, of the one that is sent to them,
and one for the next save."""


class PendingCopy(Struct, frozen=True):
    """A save with its copy."""

    save: Save
    staging: Staging

    @property
    def is_torn(self) -> bool:
        """True if the copy mixed two moments, as the stager or the keeper has detected."""
        error = self.save.failed
        by_keeper = self.staging.is_frozen_unchanged and isinstance(error, InvalidInput)
        return error is not None and (self.staging.torn or by_keeper)


class PlacedCopy(Struct, frozen=True):
    """Copy of a tensor in the arena, for a watch to hash."""

    watch: str  # its name
    tensor: SharedTensor
    index: int  # in the plan
    at: int  # offset in bytes
    num_bytes: int


class Pipeline:
    """Stages of every save of this process. Stager and keeper call it from their threads.

    Args:
        metrics: recorded numbers, sent to the keeper ahead of each save.
        skips_when_full: skip a save that no staging memory is free for, instead of waiting.
    """

    def __init__(
        self,
        objects: State,
        ranks: RankGroup,
        metrics: MetricsBuffer,
        *,
        memory_bytes: int,
        skips_when_full: bool,
        min_arenas: int,
        watching: Watching,
    ) -> None:
        self.objects = objects
        self.arenas = Arenas(memory_bytes, min_arenas)
        self.stager = Stager(self.objects.optimizers())
        self.num_skipped = 0  # saves, because no staging memory was free
        self.waited_for_memory_s = 0.0  # in all
        self._ranks = ranks
        self._skips_when_full = skips_when_full
        self._metrics = metrics
        self._in_use: dict[int, Arena] = {}
        self.plan: SavePlan | None = None  # None before the first save, and after the state was replaced
        self._structure: object = None  # of the state that the plan was made for
        self._watching = watching
        # Of the plan: tensors to hash by the name of the watch, those that other ranks hold too by name, and
        # the names of those of them that other ranks write.
        self._wanted: Mapping[str, Copies] = {}
        self._shared: Mapping[str, SharedTensor] = {}
        self._witnesses: tuple[str, ...] = ()
        self._num_saves = 0  # also of those that failed: all ranks count the same

    # -- one save --------------------------------------------------------------------------------------------
    def run(
        self, save: Save, keeper: Keeper, *, ancestors: Ancestors, to_home: bool, to_peers: bool, must: bool
    ) -> PendingCopy | None:
        """Start a save, and return it with its copy; None if no staging memory was free.

        One that `must` be made copies everything at once, and waits for staging memory.

        Ranks: collective if a save may be skipped.
        Blocks: for the copy of what no optimizer owns, and while no staging memory is free.
        """
        number, self._num_saves = self._num_saves, self._num_saves + 1
        captured = self.objects.capture()
        plan = self._plan_for(captured)
        config = keeper.config
        copies = self._copies_of(plan, number, config.attempt)
        place = config.run, save.step, config.attempt, config.rank, config.world_size
        facts = parts.PartFacts(*place, ancestors=ancestors, values=captured.values, own=plan.own)
        draft = parts.draft(facts, plan.shared_starts, plan.catalog, catalog_digest=plan.catalog_digest)
        arena = self._acquire(plan.arena_bytes, may_skip=self._skips_when_full and not must)
        if arena is None:
            return None
        self.watch_optimizers()
        self._metrics.begin_save(save.step)
        save.num_bytes = plan.num_bytes
        has_room = plan.witnesses == self._witnesses
        tiers = {"to_home": to_home, "to_peers": to_peers}
        submit = partial(self._submit, save, plan, draft, copies, keeper, has_room=has_room, **tiers)
        try:
            staging = self.stager.stage(
                plan,
                captured.tensors,
                arena,
                then=submit,
                at_once=must,
                is_lent=self.objects.are_lent,
                witnesses={one.index: one.at for one in copies if one.index >= len(plan.names)},
            )
        except BaseException:
            self.release(arena.number)
            raise
        return PendingCopy(save, staging)

    def _plan_for(self, captured: CapturedState) -> SavePlan:
        if self.plan is None or captured.structure is not self._structure:
            self._structure = captured.structure
            catalog, rank = catalog_of(captured), self._ranks.rank
            shared = shared_tensors(captured, catalog, rank) if self._watching.plans_copies else []
            self._shared, self._wanted = {one.name: one for one in shared}, self._watching.planned(shared)
            written = {name for name, _, _ in catalog.written_by(rank)}
            groups = [turns for copies in self._wanted.values() for turns in copies.groups]
            named = {name for turns in groups for turn in turns for name in turn}
            self._witnesses = tuple(name for name in self._shared if name in named and name not in written)
            sizes = {name: aligned(captured.tensors[name].nbytes) for name in self._witnesses}
            most = sum(max(sum(sizes.get(name, 0) for name in turn) for turn in turns) for turns in groups)
            plan = SavePlan(captured, catalog, rank, self._witnesses, most)
            self.plan = plan if self._has_room(plan) else SavePlan(captured, catalog, rank)
        return self.plan

    def _copies_of(self, plan: SavePlan, save: int, attempt: int) -> list[PlacedCopy]:
        """Return the copies to hash at one save; short of memory, `plan` has no witnesses."""
        indices = {name: index for index, name in enumerate(plan.live_names)} if self._wanted else {}
        placed: list[PlacedCopy] = []
        starts: dict[int, int] = {}  # offsets of the witnesses by index: two watches may want one of them
        end = plan.witness_at
        for watch, copies in self._wanted.items():
            for name in copies.names_at(save, attempt):
                index = indices.get(name)
                if index is None or name not in self._shared:
                    continue
                if index < len(plan.names):
                    at, num_bytes = plan.position(index)
                else:
                    num_bytes = plan.witness_sizes[index - len(plan.names)]
                    at = starts.setdefault(index, end)
                    end += aligned(num_bytes) if at == end else 0
                if num_bytes:
                    placed.append(PlacedCopy(watch, self._shared[name], index, at, num_bytes))
        return placed

    def _has_room(self, plan: SavePlan) -> bool:
        """Return True if the witnesses leave room for as many saves, up to two."""
        with_witnesses, without = (
            self.arenas.cap_bytes // (num_bytes + mmap.PAGESIZE)
            for num_bytes in (plan.arena_bytes, plan.image_bytes)
        )
        return with_witnesses >= min(without, 2)

    def _acquire(self, num_bytes: int, *, may_skip: bool) -> Arena | None:
        if may_skip and not all(self._ranks.gather(self.arenas.has_room(num_bytes))):
            return None  # all ranks skip together: a checkpoint of some ranks can never be complete
        began = time.perf_counter()
        has_room = self.arenas.has_room(num_bytes)
        with contextlib.nullcontext() if has_room else reported_if_slow(self._report_full):
            arena = self.arenas.acquire(num_bytes)
        self.waited_for_memory_s += time.perf_counter() - began
        self._in_use[arena.number] = arena
        return arena

    def _report_full(self) -> None:
        _log.info(
            "save() waits for staging memory: %s not written yet. Raise memory=, or save less often.",
            plural(len(self._in_use), "save is", "saves are"),
        )

    def release(self, number: int) -> None:
        """Return an arena for the next save. The keeper calls this once it has read the arena."""
        arena = self._in_use.pop(number, None)
        if arena is not None:
            self.arenas.release(arena)

    def _submit(
        self,
        save: Save,
        plan: SavePlan,
        draft: bytes,
        copies: Sequence[PlacedCopy],
        keeper: Keeper,
        staging: Staging,
        *,
        to_home: bool,
        to_peers: bool,
        has_room: bool,
    ) -> None:
        """Submit a complete copy to the keeper. Runs in the staging thread."""
        arena = staging.arena
        error = _error_of(staging, save.step)
        if error is not None:
            keeper.record("dropped", step=save.step, detail=str(error))
            keeper.drop(save.step, str(error))
            self.release(arena.number)
            save.mark_failed(error)  # last: whoever waits for it may save again at once
            return
        failpoint("trainer.staged")
        # Invariant: nothing is sent before the copy is whole, so a keeper never has half of a step (013).
        self._metrics.flush(keeper, upto=save.step)  # first, so that they precede the commit
        self._watching.record(self._metrics.take_new)
        tensors: dict[str, list[SharedTensor]] = {}
        rows: dict[str, list[tuple[int, int]]] = {}
        for one in copies:
            if one.index not in staging.torn_witnesses:  # such a copy may mix two moments
                tensors.setdefault(one.watch, []).append(one.tensor)
                rows.setdefault(one.watch, []).append((one.at, one.num_bytes))
        sections = self._watching.saving(save.step, tensors, has_room=has_room)
        draft = parts.add_findings(draft, sections, {name: tuple(places) for name, places in rows.items()})
        try:
            with self._metrics.of_save(save.step) as metrics:
                keeper.submit(
                    save,
                    arena=arena.number,
                    arena_fd=arena.fd,
                    arenas=self.arenas.numbers(),
                    layout=_arena_layout(plan, staging),
                    draft=draft,
                    to_home=to_home,
                    to_peers=to_peers,
                    metrics=metrics,
                )
        except OSError as failure:
            self.release(arena.number)
            error = RetryLater(
                f"Step {save.step} could not be sent to the keeper: {failure}.", step=save.step
            )
            keeper.drop(save.step, str(error))
            save.mark_failed(error)
            return
        failpoint("trainer.handed")  # from here on the trainer may die: the keeper has all that it needs
        keeper.record("staged", step=save.step, num_bytes=plan.num_bytes, seconds=save.staged_s or 0.0)

    # -- between saves ---------------------------------------------------------------------------------------
    def guarantee(self) -> str:
        """Return how torn copies of the current plan are detected."""
        assert self.plan is not None
        return self.stager.guarantee(self.plan)

    def watch_optimizers(self) -> None:
        """Have the steps of the state's optimizers wait for a copy under way."""
        self.stager.hook.add_known(self.objects.optimizers())

    def prepare(self) -> None:
        """Prepare the staging memory for the first save.

        Blocks: until the memory is ready and the state is in huge pages.
        """
        plan, captured = self._prepare_arena()
        self.arenas.wait_prepared()
        self.stager.settle(plan, captured.tensors)

    def prepare_in_background(self) -> None:
        """Start preparing the staging memory for the first save."""
        plan, captured = self._prepare_arena()
        self.stager.settle(plan, captured.tensors, in_background=True)

    def _prepare_arena(self) -> tuple[SavePlan, CapturedState]:
        captured = self.objects.capture()
        plan = self._plan_for(captured)
        self.watch_optimizers()
        self.arenas.prepare(plan.arena_bytes, then=plan.preparation())
        return plan, captured


def _error_of(staging: Staging, step: int) -> HoldfastError | None:
    """Return why a copy cannot be used; None if it can."""
    if staging.torn:
        return _torn(step, staging.changed)
    if staging.error is None or isinstance(staging.error, HoldfastError):
        return staging.error
    return RetryLater(f"The copy of step {step} failed: {staging.error!r}. Earlier checkpoints remain.")


def _torn(step: int, changed: Sequence[str]) -> InvalidInput:
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return InvalidInput(
        f"The save of step {step} was dropped: {changed[0]}{more} was written while it was being copied, and "
        "not by step() of an optimizer, so the copy may mix two moments. Earlier checkpoints are whole. The "
        "next call of should_save() asks for another save in its place, and the next saves copy such tensors "
        "before save() returns, which takes longer. To keep saves short, write to them before save(), or "
        "call save(...).wait_staged() first.",
        step=step,
        key=changed[0],
    )


def _arena_layout(plan: SavePlan, staging: Staging) -> ArenaLayout:
    if plan.frozen_file is None:
        return ArenaLayout(plan.file.file_bytes)
    return ArenaLayout(
        plan.file.file_bytes, plan.frozen_at, plan.frozen_file.file_bytes, staging.is_frozen_unchanged
    )
