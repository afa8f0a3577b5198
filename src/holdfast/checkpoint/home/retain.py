"""Retention: which checkpoints the policy no longer keeps, and the order of deletion of their files."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.commit import MAX_REFUSALS
from holdfast.checkpoint.home.listing import files_of, scan_step
from holdfast.checkpoint.home.metrics import read_metrics
from holdfast.checkpoint.retention import Keep, line_of
from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.system.failpoint import failpoint

_MAX_SKIPPED_ATTEMPTS = 3  # attempts whose skipped checkpoints stay, the newest of those that have any


class Deleted(Struct, frozen=True):
    """One checkpoint that retention has removed."""

    attempt: int
    step: int
    was_complete: bool


class Retention:
    """Retention of one home by one policy. Reads each manifest once.

    A policy that keeps everything deletes only incomplete saves of earlier attempts, and only once: in a home
    that grows without a limit every listing would take longer.

    Args:
        refuse: called with each incomplete step of the newest attempt before its files are deleted. It writes
            a refusal: keepers of other ranks would take the step for a checkpoint that was deleted.
        healthy_back: also keep a healthy checkpoint that is at least this many steps before the newest one,
            to go back to, and the one that will replace it; None for no such ones.

    Attributes:
        unwanted: steps to delete too, once a newer checkpoint is complete. Threads may add to it.
    """

    def __init__(
        self,
        store: Store,
        keep: Keep,
        *,
        refuse: Callable[[int], None] = lambda _: None,
        healthy_back: int | None = None,
    ) -> None:
        self.store = store
        self.keep = keep
        self._refuse, self._healthy_back = refuse, healthy_back
        self._was_complete: set[CheckpointId] = set()  # whose deletion has begun, and may be repeated
        self._healthy: dict[CheckpointId, bool] = {}  # of readable manifests
        self._metrics: dict[CheckpointId, Mapping[str, float] | None] = {}  # None: unreadable
        self.unwanted = set[int]()
        self._has_cleaned_up = False

    @property
    def is_due(self) -> bool:
        """True if a new checkpoint may make others superfluous."""
        return self.keep.last is not None or not self._has_cleaned_up or bool(self.unwanted)

    def note_metrics(self, found: CheckpointId, metrics: Mapping[str, float]) -> None:
        """Record the metrics that were just written for a checkpoint."""
        self._metrics[found] = metrics

    def apply(
        self, newest: CheckpointId, ancestors: Ancestors, needed: Collection[CheckpointId]
    ) -> Iterator[Deleted]:
        """Delete what the policy does not keep, now that `newest` is complete.

        The refusals of its attempt stay: keepers of other ranks may not have read them yet, and would take a
        refused save without files for a checkpoint that was deleted.

        Args:
            newest: the checkpoint just committed; it always stays.
            needed: checkpoints that may still become complete, or are on their way home; they stay.
        """
        files, asked = self._files(), set(self.unwanted)
        complete = {found for found, its_names in files.items() if self._is_complete(found, its_names)}
        skipped = skipped_in(files)
        doomed = self._superfluous(complete - skipped, newest, ancestors, files)
        oldest_kept = newest if self.keep.last is not None else CheckpointId(attempt=newest.attempt, step=-1)
        doomed |= {found for found in files if found not in complete and found < oldest_kept}
        doomed |= {found for found in files if found.step in asked and found < newest}
        refusals = _newest_refusals(files, newest.attempt)
        # Invariant: the newest checkpoint stays. So does what a restore has skipped: it may be whole (015).
        # The saves in work may be thousands, and few are doomed.
        for found in sorted((doomed - skipped - {newest}).difference(needed)):
            its_names = files[found]
            if found in complete:
                self._was_complete.add(found)
            else:
                its_names = [name for name in its_names if name not in refusals]
            if its_names:
                if found.attempt == newest.attempt:
                    self._refuse_incomplete(found, files[found])
                delete_files(self.store, its_names)
                self._healthy.pop(found, None)
                self._metrics.pop(found, None)
                yield Deleted(
                    attempt=found.attempt, step=found.step, was_complete=found in self._was_complete
                )
            self._was_complete.discard(found)
        self.unwanted -= _settled(asked, newest, needed)
        self._has_cleaned_up = True

    def _files(self) -> dict[CheckpointId, list[str]]:
        return files_of(self.store)

    def _is_complete(self, found: CheckpointId, its_names: Sequence[str]) -> bool:
        return names.manifest(found.step, found.attempt) in its_names

    def _refuse_incomplete(self, found: CheckpointId, its_names: Sequence[str]) -> None:
        if found not in self._was_complete and names.refusal(found.step, found.attempt) not in its_names:
            self._refuse(found.step)

    def _superfluous(
        self,
        complete: Collection[CheckpointId],
        newest: CheckpointId,
        ancestors: Ancestors,
        files: Mapping[CheckpointId, Sequence[str]],
    ) -> set[CheckpointId]:
        """Return the checkpoints that the policy does not keep, of those with a readable manifest.

        The newest healthy one stays, whatever the policy: those after it may all be of a sick training.
        """
        if self.keep.last is None:
            return set()
        line = line_of(
            # Not what a newer attempt has saved: this one may be fenced, and not know it yet.
            (found for found in complete if found == newest or (found < newest and self._is_readable(found))),
            newest,
            ancestors,
        )
        values, unreadable = self._values(line.current, files)
        kept = self.keep.kept(line.current, values) | unreadable
        if len(kept) < len(line.current):
            kept.update(itertools.islice(filter(self._is_healthy, line.current), 1))
        if len(kept) < len(line.current) and self._healthy_back is not None:
            kept |= self._healthy_before(line.current, newest.step - self._healthy_back)
        abandoned = {found for found in line.superseded if found.step <= newest.step}
        return set(line.current) - kept | abandoned

    def _healthy_before(self, line: Sequence[CheckpointId], upto: int) -> set[CheckpointId]:
        """Return the newest healthy checkpoint up to a step, and its successor."""
        healthy = [found for found in line if self._is_healthy(found)]
        before = [found for found in healthy if found.step <= upto]
        return {*before[:1], *healthy[: len(healthy) - len(before)][-1:]}

    def _values(
        self, line: Sequence[CheckpointId], files: Mapping[CheckpointId, Sequence[str]]
    ) -> tuple[dict[CheckpointId, float], set[CheckpointId]]:
        """Return the metric's value by checkpoint, and the checkpoints with unreadable values."""
        metric = self.keep.metric
        if self.keep.best is None or metric is None:
            return {}, set()
        for found in line:
            if found not in self._metrics and names.metrics(found.step, found.attempt) in files[found]:
                try:
                    self._metrics[found] = read_metrics(self.store, found)
                except (Corrupt, Unsupported):
                    self._metrics[found] = None
        known = {found: self._metrics[found] for found in line if found in self._metrics}
        values = {found: metrics[metric] for found, metrics in known.items() if metrics and metric in metrics}
        return values, {found for found, metrics in known.items() if metrics is None}

    def _is_readable(self, found: CheckpointId) -> bool:
        """Return True if the manifest can be read. Others are neither counted nor deleted."""
        if found not in self._healthy:
            name = names.manifest(found.step, found.attempt)
            try:
                manifest = manifests.parse(self.store.get(name), name)
            except (Corrupt, NotFound, Unsupported):
                return False
            self._healthy[found] = manifest.health.healthy is True
        return True

    def _is_healthy(self, found: CheckpointId) -> bool:
        """Return True if the readable manifest of a checkpoint lists it as healthy."""
        return self._is_readable(found) and self._healthy[found]


class ShareRetention(Retention):
    """Retention of one rank's share of a node-local folder, which gets some ranks' files only.

    A node-local folder has no manifests. This class receives only the newest step that all ranks have
    persisted, or that is committed in home. That one stays, and so do all newer ones, which may be complete
    or become so. No health of a checkpoint is known there.

    Args:
        is_mine: returns True for a saved rank whose files this rank deletes.
    """

    def __init__(self, store: Store, keep: Keep, is_mine: Callable[[int], bool]) -> None:
        super().__init__(store, keep)
        self._is_mine = is_mine

    @override
    def apply(
        self, newest: CheckpointId, ancestors: Ancestors, needed: Collection[CheckpointId]
    ) -> Iterator[Deleted]:
        """Delete what the policy does not keep. Some part of `newest` names its ancestors."""
        return super().apply(newest, ancestors or self._ancestors(newest), needed)

    @override
    def _files(self) -> dict[CheckpointId, list[str]]:
        return files_of(self.store, self._is_chosen)

    def _is_chosen(self, facts: names.Parsed) -> bool:
        # Manifests are left by one host on its own. Metrics are written by rank 0.
        rank = 0 if facts.kind in ("manifest", "refusal", "metrics") else facts.rank
        return facts.kind == "skipped" or self._is_mine(rank)

    @override
    def _is_complete(self, found: CheckpointId, its_names: Sequence[str]) -> bool:
        """Return True if there is a document, which is written after the data files that it describes."""
        return any(facts.kind in ("part", "manifest") for facts in map(names.parse, its_names) if facts)

    @override
    def _is_readable(self, found: CheckpointId) -> bool:
        return True

    @override
    def _is_healthy(self, found: CheckpointId) -> bool:
        return False

    def _ancestors(self, checkpoint: CheckpointId) -> Ancestors:
        """Return the ancestors that some part of the checkpoint names; () without a readable part."""
        for entry, facts in scan_step(self.store, checkpoint.step):
            if facts.kind == "part" and facts.attempt == checkpoint.attempt:
                with contextlib.suppress(Corrupt, NotFound, Unsupported):
                    return parts.parse(self.store.get(entry.name), entry.name).ancestors
        return ()


def _settled(asked: Iterable[int], newest: CheckpointId, kept: Iterable[CheckpointId]) -> set[int]:
    """Return the steps that were to be deleted, and have no checkpoint any more."""
    left = {newest.step, *(one.step for one in kept)}
    return {step for step in asked if step not in left and step <= newest.step}


def skipped_in(files: Mapping[CheckpointId, Sequence[str]]) -> set[CheckpointId]:
    """Return the checkpoints that a restore has skipped, and that are still undecided.

    Those of the newest `_MAX_SKIPPED_ATTEMPTS` attempts that have any, so that a disk that damages one
    checkpoint after the other is not filled by them. An attempt leaves no more of them than were kept.
    """
    found = {
        one
        for one, its_names in files.items()
        if names.skipped(one.step, one.attempt) in its_names and its_names[1:]
    }
    attempts = sorted({one.attempt for one in found}, reverse=True)[:_MAX_SKIPPED_ATTEMPTS]
    return {one for one in found if one.attempt in attempts}


def _newest_refusals(files: Mapping[CheckpointId, Sequence[str]], attempt: int) -> set[str]:
    """Return the names of the newest refusals of an attempt, at most `MAX_REFUSALS`."""
    refused = sorted(
        one.step
        for one, its_names in files.items()
        if one.attempt == attempt and names.refusal(one.step, attempt) in its_names
    )
    return {names.refusal(step, attempt) for step in refused[-MAX_REFUSALS:]}


# What is deleted first must be what makes the rest a checkpoint (note 001).
_ORDER = {"manifest": 0, "part": 1, "refusal": 2, "frozen": 3, "data": 4, "metrics": 5, "skipped": 6}


def delete_files(store: Store, found: Iterable[str]) -> None:
    """Delete files of one checkpoint, so that no document outlives the files it describes.

    The manifest goes first: a checkpoint without its files never looks complete. The note that a restore has
    skipped it goes last: the rest stays noted until then. Names that do not exist are skipped.

    Blocks: until the removal is durable.
    """
    for name in sorted(found, key=_position):
        store.delete(name)
        failpoint("keeper.retain")


def _position(name: str) -> tuple[int, str]:
    facts = names.parse(name)
    return _ORDER.get(facts.kind, len(_ORDER)) if facts else len(_ORDER), name
