"""Stages of restoring one checkpoint on one rank: open, check, plan, read, finish."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.format.sections import Sections
from holdfast.checkpoint.home.commit import merge_in_memory
from holdfast.checkpoint.home.documents import check_listed, read_manifest
from holdfast.checkpoint.home.newest import Skipped
from holdfast.checkpoint.home.rollbacks import NO_ROLLBACKS, Rollbacks
from holdfast.checkpoint.ranks import RankOutcome, values_of
from holdfast.checkpoint.restore.candidates import (
    Candidates,
    Loading,
    NodeLocalCheckpoint,
    Request,
    assemble,
    read_texts,
)
from holdfast.checkpoint.restore.fill import plan_fill
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import FileRead, ReadStats, Want, discard, read
from holdfast.checkpoint.restore.share import Lending, read_shared
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.tiered import TieredStore


class Stages:
    """Stages of restoring one checkpoint. Each runs once, after all ranks have completed the one before.

    What a stage returns is sent to the other ranks, so it is small. Nothing live changes before `read`, which
    adds to `touched` the names of live tensors that may have been overwritten.
    """

    manifest: Manifest  # after `open`
    _store: Store  # with the documents, after `open`
    _parts: Parts  # after `open`
    _source: int  # saved rank whose per-rank state this rank loads, after `check`
    _loading: Loading  # after `plan`

    def __init__(
        self, request: Request, found: Candidates, checkpoint: CheckpointId, touched: set[str]
    ) -> None:
        self._request, self._found = request, found
        self._checkpoint = checkpoint
        self._node_local: NodeLocalCheckpoint | None = found.node_local.get(checkpoint)
        self._is_whole = checkpoint in found.whole
        self._touched = touched
        self._texts: list[RankOutcome[list[tuple[int, str]]]] = []
        self._values: Sequence[Mapping[str, Any]] = ()
        self._jobs: Sequence[FileRead] = ()
        self.stats = ReadStats(0, 0, 0.0)  # of `read`

    def exchange_parts(self) -> None:
        """Send this rank's parts of a node-local checkpoint, and receive those of other ranks.

        An error is kept for `open`.

        Ranks: collective.
        """
        node_local, group = self._node_local, self._request.group
        if node_local is None:
            return
        own = node_local.sent_by(group.rank)
        # As pairs: JSON makes texts of the keys of an object.
        self._texts = group.agree(lambda: list(read_texts(self._request.store, own).items()))

    def open(self) -> list[tuple[int, ...]]:
        """Read the manifest, and return the checkpoint's ancestors as the rows of a message."""
        store, run = self._request.store, self._found.run
        if self._node_local is not None:
            rows = values_of(self._texts, self._request.group.rank, "could not send the parts that it has")
            texts = {rank: text for theirs in rows for rank, text in theirs}
            store = TieredStore([assemble(self._node_local, texts), *store.copies()])
        elif self._is_whole:
            made = merge_in_memory(store, self._checkpoint, run)
            store = store if made is None else TieredStore([made, *store.copies()])
        self._store, self.manifest = store, read_manifest(store, self._checkpoint, run)
        self._parts = Parts(store, self.manifest)
        return [tuple(ancestor) for ancestor in self.manifest.ancestors]

    def check(self) -> None:
        """Check that all files exist with their sizes, and read this rank's values."""
        besides = [] if self._node_local is None else [self._node_local.listing]
        check_listed(self._store, self.manifest, besides=besides)
        self._source = self._request.group.rank % self.manifest.world_size
        ranks = self._parts.structures(self._source)
        self._values = [self._parts.part(rank).values for rank in ranks]

    def plan(self) -> list[str]:
        """Plan the reads. Returns overwritten tensors that this checkpoint does not hold."""
        own = replace(self.manifest, tensors=self._parts.tensors_for(self._source))
        self._loading = self._request.load(own, self._values)
        self._jobs = plan_fill(self._parts, self._loading.targets, self._source)
        if self._request.selection.verify:
            self._jobs = [*self._jobs, *self._whole_files()]
        return sorted(self._touched - self._loading.targets.keys())[:100]

    def _whole_files(self) -> Iterator[FileRead]:
        """Yield jobs that read this rank's share of all files.

        With node-local folders these are files of its own tiers.
        """
        group, parts = self._request.group, self._parts
        for saved in range(self.manifest.world_size):
            holders = range(group.world_size) if self._node_local is None else self._node_local.holders[saved]
            readers = sorted(holders) or range(group.world_size)
            if readers[saved % len(readers)] != group.rank:
                continue
            part = parts.part(saved)
            for frozen in (False, True)[: len(part.files)]:
                num_bytes = part.files[part.file_name(frozen=frozen)].num_bytes
                yield FileRead(part, [Want(0, num_bytes, discard)], frozen)

    def read(self) -> None:
        """Fill the live tensors with verified bytes."""
        request = self._request
        self._touched.update(self._loading.targets)
        if self._node_local is not None:
            self.stats = self._read_node_local(self._node_local)
        elif request.share_reads and request.group.world_size > 1:
            self.stats = read_shared(request.store, self._jobs, request.group, on_bytes=request.on_bytes)
        else:
            self.stats = read(
                request.store, self._jobs, num_threads=request.num_threads, on_bytes=request.on_bytes
            )

    def _read_node_local(self, node_local: NodeLocalCheckpoint) -> ReadStats:
        """Read the files in this rank's own tiers, and receive the rest from other ranks."""
        request, holders = self._request, node_local.holders
        near = [job for job in self._jobs if request.group.rank in holders[job.part.rank]]
        far = [job for job in self._jobs if request.group.rank not in holders[job.part.rank]]
        # First the files that others may need from us: a rank that fails below must not be waited for.
        lending = Lending(holders, self._parts.part)
        lent = read_shared(request.store, far, request.group, on_bytes=request.on_bytes, lending=lending)
        own = read(request.store, near, num_threads=request.num_threads, on_bytes=request.on_bytes)
        return lent.plus(own)

    def finish(self) -> None:
        """Set everything that is not a tensor."""
        self._loading.finish()


class Restored(OfCheckpoint, Struct, frozen=True):
    """Restored checkpoint, and those that were skipped for it. Bytes and seconds are this rank's."""

    step: int
    attempt: int
    ancestors: Ancestors
    world_size: int  # ranks that saved it
    num_bytes: int
    seconds: float
    skipped: tuple[Skipped, ...]
    sources: Mapping[str, int]  # bytes by the URL of the tier they came from
    recovered_from: tuple[str, ...]  # damage in nearer copies, of which a farther tier had a good one
    finished: tuple[tuple[CheckpointId, str], ...] = ()  # with the URL where its manifest was written
    whole: tuple[CheckpointId, ...] = ()  # checkpoints that still lack only their manifest
    seen: tuple[CheckpointId, ...] = ()  # everything that could have been restored
    rollbacks: Rollbacks = NO_ROLLBACKS  # of the run
    watches: Sections = {}  # findings of watches, in its manifest
    is_in_store: bool = True  # False for copies in memory and local folders that no manifest names yet
    in_store: CheckpointId | None = None  # the newest checkpoint of which a store has everything
