"""Restore of one attempt, with its records in home, and the differences from the saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.claim import check_same_run
from holdfast.checkpoint.home.newest import Skipped
from holdfast.checkpoint.keeper import Keeper, free_memory_tier
from holdfast.checkpoint.restore.candidates import Request, Selection
from holdfast.checkpoint.restore.resume import restore_newest
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.tiers import Base
from holdfast.checkpoint.state import Load
from holdfast.errors import ResumeWarning
from holdfast.system.callsite import warn
from holdfast.system.units import plural


class Restoration:
    """Restore of an attempt, before its claim or after it."""

    def __init__(self, components: Components) -> None:
        self.has_run = self._has_freed = False
        self.differences = Differences()  # of the restored checkpoint from the state, on this rank
        self._load: Load | None = None  # of the checkpoint that is tried
        self._found: Restored | None = None
        self._components = components
        self._tiers, self._ranks = components.tiers, components.ranks
        self._patience_s = components.options.reads.patience_s
        self._marks: list[Callable[..., None]] = []  # calls of `Tiers.mark` that wait for the claim

    @property
    def base(self) -> Base:
        """Basis of the attempt's claim."""
        found = self._found
        if found is None:
            return Base(None, is_fresh=not self.has_run)
        return Base(found.checkpoint_id, frozenset(found.seen))

    def run(
        self, selection: Selection, keeper: Keeper | None, *, run: str | None, local_ranks: tuple[int, ...]
    ) -> Restored | None:
        """Restore the newest verified checkpoint, or the selected one; `keeper` is None before the claim.

        Ranks: collective.
        """
        tiers = self._tiers
        if keeper is None and (local := tiers.local_store) is not None:
            self._ranks.first_of(
                range(self._ranks.world_size), lambda: check_same_run(tiers.home_store, local)
            )
        is_node_local = self._tiers.local is not None and 0 < len(local_ranks) < self._ranks.world_size

        def mark(skipped: Sequence[Skipped], restored: CheckpointId | None) -> None:
            rank = self._ranks.rank
            call = partial(self._tiers.mark, skipped, restored, rank=rank, is_node_local=is_node_local)
            if restored is None or keeper is not None:
                # Also without a claim if nothing was restored: the next start may be another process.
                call(run=run)
            else:
                self._marks.append(call)

        options = self._components.options
        with_copies = options.peers is not None
        tiers_here = self._tiers.reading(is_node_local=is_node_local, with_copies=with_copies)
        with tiers_here as (store, own_local):
            request = Request(
                store,
                partial(self._make_load, selection),
                self._ranks,
                selection,
                keep=options.keep,
                num_threads=options.reads.threads,
                share_reads=options.reads.shared,
                own_local=own_local,
                may_commit=keeper is not None,
                show=self._components.show,
                patience_s=self._patience_s,
                mark=mark,
            )
            self._found = restore_newest(request)
        self.differences = Differences.of(None if self._found is None else self._load)
        self._load = None  # it holds memory
        self.has_run = True
        if keeper is not None:
            self._complete(keeper)
        return self._found

    def _make_load(
        self, selection: Selection, manifest: Manifest, values: Sequence[Mapping[str, Any]]
    ) -> Load:
        """Return the plan that fills the state, or new objects, from a checkpoint."""
        own, *others = values
        objects = self._components.pipeline.objects
        is_own_rank = manifest.world_size == self._ranks.world_size
        if selection.is_new:
            self._load = objects.load_new(
                manifest.tensors,
                manifest.tied,
                own,
                only=selection.only,
                with_rng=selection.with_rng,
                own_rank=is_own_rank,
            )
        else:
            self._load = objects.load(
                manifest.tensors,
                manifest.tied,
                own,
                others=others,
                strict=selection.strict,
                only=selection.only,
                kept=selection.kept,
                rename=selection.rename,
                with_rng=selection.with_rng,
                own_rank=is_own_rank,
            )
        return self._load

    def end_claim(self, keeper: Keeper) -> None:
        """Write the records that had to wait for the claim.

        Ranks: collective.
        """
        self._ranks.first_of(range(self._ranks.world_size), lambda: self._write_marks(keeper))
        self._complete(keeper)

    def _write_marks(self, keeper: Keeper) -> None:
        """Mark in home what was skipped before the claim, so that retention keeps it."""
        while self._marks:
            self._marks[0](run=keeper.config.run)
            self._marks.pop(0)

    def free_memory(self) -> None:
        """Free the memory that keepers of dead trainers have held for a restore.

        With peers it may be all that there is of the restored step, until a save of this attempt is safe.
        """
        if self.has_run and not self._has_freed:
            self._has_freed = True
            free_memory_tier(self._tiers.home)

    def _complete(self, keeper: Keeper) -> None:
        """Record what the attempt continues, and complete commits, which only a claimed attempt may."""
        found = self._found
        if self.has_run and self._components.options.peers is None:
            self.free_memory()
        if found is None:
            return
        if self._ranks.rank == 0:
            completed = self._tiers.finish_commits(keeper.config.run, found.whole)
            for (attempt, step), url in (*found.finished, *completed):
                detail = f"attempt {attempt}, which ended before it could write the manifest"
                keeper.record("committed", step=step, detail=detail, tier=self._tiers.name_of({url: 1}))
        if self._tiers.local is not None:
            keeper.drain_checkpoint(found.checkpoint_id)  # its own attempt may not have drained it
        if keeper.config.is_node_local:
            keeper.mark_complete(found.checkpoint_id)
        notes = [*describe_skipped(found), *describe_saved_steps(found), *self.differences.for_history()]
        detail, tier = "; ".join([f"attempt {found.attempt}", *notes]), self._tiers.name_of(found.sources)
        step, num_bytes, seconds = found.step, found.num_bytes, found.seconds
        keeper.record(
            "restored", step=step, num_bytes=num_bytes, seconds=seconds, detail=detail, tier=tier, surely=True
        )


def describe_skipped(found: Restored) -> list[str]:
    """Return a line for each checkpoint that a restore skipped or repaired."""
    skipped = [f"skipped step {one.step} of attempt {one.attempt}: {one.reason}" for one in found.skipped]
    return [*skipped, *found.recovered_from]


def describe_saved_steps(found: Restored) -> list[str]:
    """Return a line about what copies on several hosts have saved; none if a store has the checkpoint."""
    if found.is_in_store:
        return []
    newest = "no checkpoint" if found.in_store is None else f"step {found.in_store.step}"
    return [f"step {found.step} is in memory and folders of several hosts only; without them: {newest}"]


_MAX_NAMED = 3  # names in a line
_MAX_SHOWN = 5  # lines of a warning
_MAX_SENT = 20  # lines of a rank


class Differences(Struct, frozen=True):
    """Differences of one restore on one rank, as lines. Unlike the load, they keep no memory in use."""

    values: tuple[str, ...] = ()  # live values that are not those of the checkpoint
    left_out: tuple[str, ...] = ()  # names that only the checkpoint has
    generators: tuple[str, ...] = ()  # of the process, that are not set as saved

    @classmethod
    def of(cls, load: Load | None) -> Differences:
        """Return the differences of a completed load."""
        if load is None:
            return cls()
        values = _group(load.notes) if load.notes else []
        if names := load.missing:
            num = plural(len(names), "name")
            values.append(
                f"{num} in the live state but not in the checkpoint, left unchanged: {_named(names)}."
            )
        left_out: list[str] = []
        if names := load.unexpected:
            num = plural(len(names), "name")
            left_out.append(
                f"{num} in the checkpoint but not in the live state, not restored: {_named(names)}."
            )
        return cls(tuple(values), tuple(left_out), tuple(load.generator_notes))

    def for_history(self) -> list[str]:
        """Return some lines for a list with semicolons."""
        lines = [*shorten([*self.values, *self.left_out]), *self.generators]
        return [line.rstrip(".") for line in lines]


class DifferenceReport:
    """Report of differences to the user. `steps` restores again, and each is reported once."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._shown: tuple[list[str], list[str]] = ([], [])

    def show(self, step: int, found: Differences) -> None:
        """Warn of values that differ, and log the rest, on rank 0.

        Ranks: collective.
        """
        ranks, lines, harmless = self._components.ranks, list(found.values), list(found.generators)
        # Objects that a caller gives for one load are often a part of the checkpoint.
        (harmless if self._components.pipeline.objects.are_lent else lines).extend(found.left_out)
        rows = ranks.gather(lines[:_MAX_SENT])
        lines = merge(rows) if any(rows) else []
        if ranks.rank != 0 or (lines, harmless) == self._shown:
            return
        self._shown = lines, harmless
        for line in harmless:
            self._components.show(line)
        if lines:
            warn(
                f"The state differs from the checkpoint of step {step} that was restored into it. If that is "
                "not intended, build the objects as they were when they were saved, and restore again:\n  "
                + "\n  ".join(shorten(lines)),
                ResumeWarning,
            )


def _group(notes: Sequence[str]) -> list[str]:
    """Join notes that are alike but for the name that they begin with."""
    labels: dict[str, list[str]] = {}
    for note in notes:
        label, _, text = note.rpartition(": ")
        if not label or " " in label.replace(": ", ""):
            label, text = "", note  # a sentence
        labels.setdefault(text, []).append(label)
    return [f"{_named(names)}: {text}" if names[0] else text for text, names in labels.items()]


def merge(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of all ranks, each once: those of rank 0, then others with their first rank."""
    lines = list(rows[0])
    seen = set(lines)
    for rank, row in enumerate(rows):
        lines += [f"rank {rank}: {line}" for line in row if line not in seen]
        seen.update(row)
    return lines


def shorten(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and the number of those that are left out."""
    left = len(lines) - _MAX_SHOWN
    return [*lines[:_MAX_SHOWN], *([f"and {left} more"] if left > 0 else [])]


def _named(names: Sequence[str]) -> str:
    left = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {left} more" if left > 0 else "")
