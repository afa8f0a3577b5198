"""Candidates of a restore: the checkpoints in the tiers of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.layout import FillTarget
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.messages import MAX_BYTES
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.format.part import parse as parse_part
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.commit import make_manifest, merge_saved, recover_commit
from holdfast.checkpoint.home.documents import read_draft
from holdfast.checkpoint.home.listing import ListedSave, Listing, candidates, list_home
from holdfast.checkpoint.home.losses import find_losses
from holdfast.checkpoint.home.metrics import MetricByCheckpoint, read_values
from holdfast.checkpoint.home.newest import LIMIT_S, Patience, Skipped, no_such_checkpoint
from holdfast.checkpoint.home.rollbacks import NO_ROLLBACKS, Rollbacks, read_rollbacks
from holdfast.checkpoint.ranks import RankGroup, raise_first, values_of
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import first_good
from holdfast.errors import Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.system.documents import decode_as, read_as, to_plain


class Loading(Protocol):
    """Plan that fills live objects from one checkpoint. Making it changes nothing live."""

    @property
    def targets(self) -> Mapping[str, Sequence[FillTarget]]:
        """Contiguous tensors of the saved dtypes, with their regions, by saved name."""
        ...

    def finish(self) -> None:
        """Complete the load, once all targets of all ranks are filled and verified."""
        ...


StateLoad = Callable[[Manifest, Sequence[Mapping[str, Any]]], Loading]
"""Function that plans the load of a checkpoint from its manifest, this rank's values and those of other
structures."""
Mark = Callable[[Sequence[Skipped], "CheckpointId | None"], None]
"""Function that records which checkpoints were skipped, and deletes the note about the restored one."""


def _ignore(*_: object) -> None:
    """Do nothing."""


class Selection(Struct, frozen=True):
    """Checkpoint and state entries that a restore is asked for."""

    step: int | None = None  # only this step; the newest attempt that saved it is tried first
    strict: bool = True
    only: Collection[str] | None = None
    rename: Mapping[str, str] | Callable[[str], str] | None = None
    best: bool = False  # the best checkpoint by the run's metric
    healthy: bool = False  # the newest checkpoint that is marked as healthy
    is_new: bool = False  # into new tensors and values
    with_rng: bool = True  # with the random number generators of the process
    verify: bool = False  # read everything, also what is not loaded; each rank a share of the files
    choices: tuple[CheckpointId, ...] | None = None  # the newest of these and no other
    kept: Collection[str] = ()  # key paths of objects that stay as they are


class Request(Struct, frozen=True):
    """Request for a restore; the same on all ranks but for the stores and functions of each."""

    store: Store  # home, or all tiers of this rank as one
    load: StateLoad
    group: RankGroup  # ranks that restore; need not be as many as have saved
    selection: Selection = Selection()
    keep: Keep = field(default_factory=Keep)  # whose metric the best checkpoint is chosen by
    num_threads: int | None = None  # threads that read, hash and copy; None for what suits the nearest tier
    on_bytes: Callable[[int], None] | None = None  # called with the size of each read, never by two threads
    share_reads: bool = False  # each chunk is read by one of the ranks that need it, and sent to the others
    own_local: Store | None = None  # this rank's local folder, where other ranks have others
    may_commit: bool = True  # write missing manifests; False without a claim, beside a living writer
    show: Callable[[str], None] = _ignore  # called with a line for the user
    patience_s: float = LIMIT_S  # time limit for retries of what cannot be read
    mark: Mark = _ignore  # called on every rank, and again while it raises RetryLater


class Candidates(Struct, frozen=True):
    """Checkpoints that may be restored. Equal on all ranks."""

    run: str | None
    found: tuple[CheckpointId, ...] = ()  # newest first
    whole: tuple[CheckpointId, ...] = ()  # of these, those that lack their manifest
    denied: tuple[Skipped, ...] = ()  # complete but for a manifest that could not be written
    finished: tuple[tuple[CheckpointId, str], ...] = ()  # whose manifest was written, with the URL
    marked: tuple[CheckpointId, ...] = ()  # skipped by an earlier restore
    losses: tuple[str, ...] = ()  # signs of lost checkpoints, if rank 0 has found none
    rollbacks: Rollbacks = NO_ROLLBACKS
    holdings: tuple[Holding, ...] = ()  # files in home of checkpoints that are not complete there
    node_local: dict[CheckpointId, NodeLocalCheckpoint] = {}  # complete in local folders and home together
    lacking: dict[CheckpointId, list[int]] = {}  # ranks whose files no tier has


def find_candidates(request: Request, patience: Patience) -> Candidates:
    """Find the checkpoints that may be restored. Commits those that lack only their manifest.

    Ranks: collective.
    """
    # Rank 0 lists all tiers, or only home if other ranks have other local folders.
    store = request.store if request.own_local is None else request.store.copies()[-1]
    find, group = partial(patience.spend, store.url, partial(_list_tiers, store, request)), request.group
    if group.world_size == 1:
        listed = find()  # there is no other rank to send it to
    else:
        outcome = group.on_first(lambda: json.dumps(to_plain(find())))
        raise_first([outcome], group.rank, f"could not list {store.url}")
        listed = decode_as(Candidates, outcome.value or "", "the list of rank 0", max_bytes=MAX_BYTES)
    if request.own_local is not None:
        listed = _with_node_local(request.own_local, request.group, listed, patience)
    step = request.selection.step
    if step is not None:
        denied = tuple(one for one in listed.denied if one.step == step)
        if not denied and not any(one.step == step for one in listed.found):
            raise no_such_checkpoint(store.url, listed.found, step)
        listed = replace(listed, denied=denied)
    return listed


def _list_tiers(store: Store, request: Request) -> Candidates:
    """List every copy of a store, and complete the saves that lack only their manifest."""
    run = read_run(store)
    run_id = run.id if run else None
    homes = [(copy, list_home(copy)) for copy in store.copies()]
    complete = {found for _, home in homes for found in candidates(home)}
    marked = {one for _, home in homes for one, saved in home.saved.items() if saved.was_skipped}
    whole, denied = set[CheckpointId](), list[Skipped]()
    finished: list[tuple[CheckpointId, str]] = []
    for copy, saved in ((copy, saved) for copy, home in homes for saved in home.by_step()):
        checkpoint = saved.checkpoint_id
        if request.selection.step not in (None, saved.step):
            continue
        if not request.may_commit:
            if checkpoint not in complete and merge_saved(copy, saved, run_id) is not None:
                whole.add(checkpoint)
            continue
        try:
            if recover_commit(copy, saved, run_id):
                finished.append((checkpoint, copy.url))
        except (Denied, RetryLater) as error:
            if checkpoint in complete:
                continue  # in another copy, so that the failure here does no harm
            if isinstance(error, RetryLater):
                message = f"Step {saved.step} lacks only its manifest, which could not be written: {error}"
                raise RetryLater(message, step=saved.step) from error
            reason = f"its manifest is missing and could not be written: {error}"
            denied.append(Skipped(step=saved.step, attempt=saved.attempt, reason=reason))
    found = complete | whole | {checkpoint for checkpoint, _ in finished}
    return Candidates(
        run=run_id,
        found=_newest_first(found),
        whole=tuple(sorted(whole)),
        denied=tuple(denied),
        finished=tuple(finished),
        marked=tuple(sorted(marked)),
        losses=() if found else tuple(find_losses(store.copies())),
        rollbacks=read_rollbacks(store.copies(), run_id),
        holdings=() if request.own_local is None else tuple(find_holdings(store, run_id, besides=found)),
    )


def _newest_first(found: Iterable[CheckpointId]) -> tuple[CheckpointId, ...]:
    """Return checkpoints by attempt, then step, never by time, as clocks differ.

    An attempt continues what it restored: note 001.
    """
    return tuple(sorted(found, reverse=True))


def _with_node_local(
    own_local: Store, group: RankGroup, listed: Candidates, patience: Patience
) -> Candidates:
    """Add the checkpoints that all folders and home hold together, and the missing ranks of others."""
    find = partial(find_holdings, own_local, listed.run, besides=listed.found)
    rows = values_of(
        group.agree(lambda: to_plain(patience.spend(own_local.url, find))),
        group.rank,
        "could not list its local folder",
    )
    local = read_as(list[list[Holding]], rows, "the files in local folders")
    complete, lacking = put_together(local, listed.holdings)
    node_local = {one.checkpoint: one for one in complete}
    return replace(
        listed,
        found=_newest_first({*listed.found, *node_local}),
        denied=tuple(one for one in listed.denied if one.checkpoint_id not in node_local),
        node_local=node_local,
        lacking=lacking,
    )


def gather_values(request: Request, found: Candidates, metric: str, patience: Patience) -> MetricByCheckpoint:
    """Return the values of a metric, from the tiers of all ranks.

    Ranks: collective.
    """
    store = request.store if request.group.rank == 0 else request.own_local

    def read() -> tuple[list[tuple[int, int, float]], str | None]:
        if store is None:
            return [], None
        held = patience.spend(store.url, partial(read_values, store, metric, found.found))
        return [(one.attempt, one.step, value) for one, value in held.values.items()], held.mode

    rows = values_of(
        request.group.agree(read), request.group.rank, "could not read the metrics of checkpoints"
    )
    values = {
        CheckpointId(attempt=attempt, step=step): value
        for theirs, _ in reversed(rows)
        for attempt, step, value in theirs
    }
    return MetricByCheckpoint(values, next((mode for _, mode in rows if mode is not None), None))


class Holding(OfCheckpoint, Struct, frozen=True):
    """A rank's complete files of one checkpoint, with a part that matches them."""

    attempt: int
    step: int
    rank: int  # the rank that saved them
    world_size: int  # of the attempt that saved them
    part_bytes: int
    seal: str
    data_bytes: int
    frozen_bytes: int | None


class NodeLocalCheckpoint(Struct, frozen=True):
    """A checkpoint that is incomplete in home, but complete in several tiers together."""

    checkpoint: CheckpointId
    files: tuple[Holding, ...]  # by the rank that saved
    holders: Mapping[int, tuple[int, ...]]  # by the rank that saved, the living ranks that can read its files

    @property
    def listing(self) -> Listing:
        """Listing of a place that had all its files."""
        saved = ListedSave(step=self.checkpoint.step, attempt=self.checkpoint.attempt)
        for file in self.files:
            saved.parts[file.rank] = file.part_bytes
            saved.data[file.rank] = file.data_bytes
            if file.frozen_bytes is not None:
                saved.frozen[file.rank] = file.frozen_bytes
        return Listing((), {self.checkpoint: saved}, ())

    def sent_by(self, rank: int) -> list[Holding]:
        """Return the files whose parts a rank sends to the others; each part is sent by one rank."""
        return [file for file in self.files if self.holders[file.rank][0] == rank]


def find_holdings(
    store: Store, run_id: str | None, *, besides: Collection[CheckpointId] = ()
) -> list[Holding]:
    """Return the files in a store that match their parts, of any rank and step; of any run if it is None."""
    found: list[Holding] = []
    for checkpoint, saved in list_home(store).saved.items():
        if checkpoint in besides:
            continue
        for rank in sorted(saved.parts.keys() & saved.data.keys()):
            try:
                part = read_draft(store, saved, rank)
            except (Corrupt, NotFound, Unsupported):
                continue
            if run_id is None or part.run == run_id:
                world = checkpoint.attempt, checkpoint.step, rank, part.world_size
                found.append(Holding(*world, *part.listed))
    return found


def put_together(
    local: Sequence[Iterable[Holding]], in_home: Iterable[Holding]
) -> tuple[list[NodeLocalCheckpoint], dict[CheckpointId, list[int]]]:
    """Return the checkpoints that all places hold together, and the missing ranks of others.

    Pure, so that every rank computes the same. `local` has the files in the folder of each rank.
    """
    everyone = tuple(range(len(local)))
    copies: dict[CheckpointId, dict[int, dict[Holding, tuple[int, ...]]]] = {}

    def add(file: Holding, holders: tuple[int, ...]) -> None:
        of_rank = copies.setdefault(file.checkpoint_id, {}).setdefault(file.rank, {})
        of_rank[file] = (*of_rank.get(file, ()), *holders)

    for file in in_home:
        add(file, everyone)
    for rank, files in enumerate(local):
        for file in files:
            add(file, (rank,))
    complete: list[NodeLocalCheckpoint] = []
    lacking: dict[CheckpointId, list[int]] = {}
    for checkpoint, by_rank in copies.items():
        world_size = max(file.world_size for found in by_rank.values() for file in found)
        absent = [rank for rank in range(world_size) if rank not in by_rank]
        if absent:
            lacking[checkpoint] = absent
            continue
        # No file is written twice with other bytes. If it were, the copy that most ranks can read is used.
        chosen = [max(by_rank[rank].items(), key=lambda copy: len(copy[1])) for rank in range(world_size)]
        holders = {file.rank: tuple(sorted(set(ranks))) for file, ranks in chosen}
        complete.append(NodeLocalCheckpoint(checkpoint, tuple(file for file, _ in chosen), holders))
    return complete, lacking


def read_texts(store: Store, files: Iterable[Holding]) -> dict[int, str]:
    """Return the part documents of some ranks' files, by rank."""
    texts: dict[int, str] = {}
    for file in files:
        name = names.part(file.step, file.attempt, file.rank)
        texts[file.rank] = first_good(store, partial(_text, name, file)).decode()
    return texts


def _text(name: str, file: Holding, copy: Store) -> bytes:
    text = copy.get(name)
    if parse_part(text, name).seal != file.seal:
        message = f"{copy.url}/{name} has changed since it was found by this start."
        raise Corrupt(message, step=file.step, rank=file.rank, key=name)
    return text


def assemble(found: NodeLocalCheckpoint, texts: Mapping[int, str]) -> MemoryStore:
    """Return the documents of a node-local checkpoint in memory, with the manifest of its commit.

    Pure but for the store that it makes: every rank makes the same manifest.
    """
    store, step, attempt = MemoryStore("parts"), found.checkpoint.step, found.checkpoint.attempt
    documents = [(names.part(step, attempt, rank), texts[rank].encode()) for rank in range(len(found.files))]
    joined = digest(b"".join(text for _, text in documents))
    parts = [parse_part(text, name) for name, text in documents]
    try:
        manifest: Manifest = make_manifest(parts, id=joined, created_unix_s=0.0)
    except InvalidInput as error:  # not the caller's fault here
        raise Corrupt(str(error), step=step, rank=error.rank, key=error.key) from error
    for name, text in documents:
        store.put(name, text)
    store.put(names.manifest(step, attempt), manifests.document(manifest))
    return store
