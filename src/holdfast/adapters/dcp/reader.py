"""HoldfastReader: `torch.distributed.checkpoint` loads Holdfast checkpoints through it, verified."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.adapters.dcp.documents import INDEX, Index
from holdfast.adapters.dcp.gather import sinks
from holdfast.adapters.dcp.place import Place
from holdfast.callsite import warn
from holdfast.errors import Corrupt, HoldfastError, NotFound, ResumeWarning, RetryLater
from holdfast.format import values as value_format
from holdfast.format.cuts import Box
from holdfast.format.manifest import Manifest
from holdfast.format.part import Part
from holdfast.home.documents import check_files, read_manifest, read_run
from holdfast.home.listing import candidates
from holdfast.home.newest import list_patiently, usable
from holdfast.home.patience import LIMIT_S, Patience
from holdfast.home.skipped import Passed
from holdfast.restore.parts import Located, Parts
from holdfast.restore.read import Job, Want, read
from holdfast.state.tensors import torch_dtype
from holdfast.store import open_store
from holdfast.store.contract import Store


@dataclass(slots=True)
class _Opened:
    """The checkpoint that is being loaded; parts are read when something of them is needed."""

    store: Store
    manifest: Manifest
    parts: Parts
    index: Index

    @property
    def id(self) -> str:
        return self.manifest.id


class HoldfastReader(StorageReader):
    """Storage for `dcp.load`: reads Holdfast checkpoints, whatever layout and number of ranks saved them.

    Every chunk that is read is hashed before any of it is used, and only chunks that are needed are read.
    Nothing of the checkpoint is unpickled. Damage is an error that names file and tensor, after which tensors
    may have been partly loaded: load an older step.

    A `checkpoint_id` overrides the arguments: `HOME/step-N` is step N of that home, anything else is a home.

    Args:
        home: folder that holds the run's checkpoints.
        step: which step; default the newest one of which manifest, parts and files are all there.
        num_threads: threads of each rank that read, hash and copy.

    Raises:
        InvalidInput: an argument cannot be used.
    """

    def __init__(
        self, home: str | os.PathLike[str], *, step: int | None = None, num_threads: int = 4
    ) -> None:
        super().__init__()
        self._given = Place.of(home, step)
        self._place = self._given
        self._num_threads = num_threads
        self._opened: _Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageReader: begin another load, of `checkpoint_id` if one is given."""
        self._place = self._given.at(checkpoint_id)
        self._opened = None

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that was loaded last; None before the first load."""
        return None if self._opened is None else self._opened.manifest.step

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """See StorageReader: choose the checkpoint, read its manifest and the part of rank 0.

        Raises:
            NotFound: no complete checkpoint, or none of that step.
            Corrupt: manifest or part are damaged, and there is no other.
            RetryLater: the newest checkpoint, or that of the step, could not be read for 2 minutes.
            Denied: the store refuses access.
        """
        self._opened = opened = _open(self._place)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = dict(_tensors(opened))
        entries.update((name, BytesStorageMetadata()) for name in opened.index.ranks)
        paths = {name: opened.index.paths.get(name, tuple(name.split("."))) for name in entries}
        return Metadata(entries, planner_data=paths, storage_meta=StorageMeta(self._place.home))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See StorageReader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See StorageReader: adds which checkpoint this rank has chosen."""
        opened = self._now()
        plan.storage_data = (opened.id, opened.manifest.step)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader.

        Raises:
            RetryLater: a checkpoint became complete while the ranks chose the newest, each for itself.
        """
        chosen = {plan.storage_data for plan in plans}
        if len(chosen) > 1:
            steps = sorted(step for _, step in chosen)
            message = (
                f"The ranks have chosen different checkpoints of {self._place.home} (steps {steps}): one was "
                "saved or deleted meanwhile. Nothing was loaded. Load again, or pass step=."
            )
            raise RetryLater(message)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See StorageReader: what this rank needs, verified.

        Raises:
            Corrupt: damage was found, named by file and tensor.
            NotFound: a file is missing.
            RetryLater: the store failed.

        Blocks: until all is read.
        """
        opened = self._now()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_torch_saves(opened, item.storage_index))
        targets = [
            (item, planner.resolve_tensor(item).detach())
            for item in plan.items
            if item.type == LoadItemType.TENSOR
        ]
        read(opened.store, _jobs(opened.parts, targets), num_threads=self._num_threads)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _now(self) -> _Opened:
        assert self._opened is not None, "read_metadata() comes first"
        return self._opened

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See StorageReader: True if this names a place that can be read."""
        try:
            open_store(Place.of("", None).at(checkpoint_id).home)
        except HoldfastError:
            return False
        return True


def _open(place: Place) -> _Opened:
    store = open_store(place.home)
    patience = Patience(LIMIT_S, lambda line: warn(line, ResumeWarning))
    home = list_patiently(store, patience)
    every = candidates(home)
    matching = [(a, s) for a, s in every if place.step in (None, s)]
    if not matching:
        asked = "checkpoint" if place.step is None else f"checkpoint of step {place.step}"
        steps = ", ".join(str(step) for _, step in every[:20]) or "none"
        message = f"{store.url} holds no complete {asked}. Complete steps, newest first: {steps}."
        raise NotFound(message, step=place.step)
    run = patience.spend(store.url, lambda: _run_id(store))
    passed: list[Passed] = []
    errors: list[HoldfastError] = []

    def note(one: Passed, error: HoldfastError) -> None:
        passed.append(one)
        errors.append(error)

    def take(attempt: int, step: int) -> _Opened:
        manifest = read_manifest(store, step, attempt, run)
        check_files([home], manifest)
        parts = Parts(store, manifest)
        return _Opened(store, manifest, parts, _index(parts))

    for opened in usable(matching, take, url=store.url, patience=patience, on_passed=note):
        for one in passed:
            message = (
                f"Step {opened.manifest.step} is loaded, since step {one.step} of attempt {one.attempt} "
            )
            warn(f"{message}is damaged: {one.reason}", ResumeWarning)
        return opened
    raise errors[0]


def _run_id(store: Store) -> str | None:
    try:
        found = read_run(store)
    except Corrupt:
        return None  # the manifests are sealed on their own; a damaged run document must not lock them in
    return found.id if found else None


def _index(parts: Parts) -> Index:
    """The index that the part of rank 0 keeps; empty for a checkpoint that came from no DCP.

    The values of a Checkpointer are left out: they are trees by object, not names.
    """
    part = parts.part(0)
    if INDEX not in part.values:
        return Index({}, {})
    try:
        return Index.parse(part.values[INDEX], part.world_size)
    except Corrupt as error:
        message = f"{part.what} has an index of values that cannot be read: {error}"
        raise Corrupt(message, step=part.step, rank=0, key=INDEX) from error


def _tensors(opened: _Opened) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """What DCP must know of each tensor and alias; of per-rank tensors, of the first rank's."""
    tied = opened.manifest.tied
    for name in [*opened.manifest.tensors, *tied]:
        tensor = opened.manifest.tensors[tied.get(name, name)]
        known = opened.parts.shape_of(tied.get(name, name), 0)
        if known is None:
            continue
        dtype, shape = known
        boxes = [Box.whole(shape)] if tensor.cut is None else [box for _, box in tensor.cut.boxes(shape)]
        chunks = {
            box.offsets: ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
            for box in boxes
            if box.num_items or 0 in shape
        }
        properties = TensorProperties(dtype=torch_dtype(dtype))
        yield name, TensorStorageMetadata(properties, torch.Size(shape), list(chunks.values()))


def _as_torch_saves(opened: _Opened, index: MetadataIndex) -> io.BytesIO:
    """A value as planners expect it. It is pickled here, in memory, from what plain JSON says."""
    part = opened.parts.part(opened.index.ranks[index.fqn])
    try:
        value = value_format.decode(part.values[index.fqn])
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        message = f"The value {index.fqn} of step {opened.manifest.step} cannot be decoded: {error!r}."
        raise Corrupt(message, step=opened.manifest.step, key=index.fqn) from error
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _jobs(parts: Parts, targets: Iterable[tuple[ReadItem, torch.Tensor]]) -> list[Job]:
    """What must be read from each file."""
    wanted: dict[tuple[int, bool], list[Want]] = {}
    for item, target in targets:
        name, box = _saved_box(parts.manifest, item)
        if not box.num_items:
            continue
        for found in parts.pieces_of(name, 0, box):  # one: items are made from the boxes in the metadata
            key = found.rank, found.piece.frozen
            wanted.setdefault(key, []).extend(_wants(parts.part(found.rank), found, box, target))
    return [Job(parts.part(rank), wants, frozen) for (rank, frozen), wants in wanted.items()]


def _saved_box(manifest: Manifest, item: ReadItem) -> tuple[str, Box]:
    """The saved tensor that an item reads from, and which box of it."""
    index = item.storage_index
    inside, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    chunk = (0,) * len(inside) if index.offset is None else tuple(index.offset)
    offsets = tuple(a + b for a, b in zip(chunk, inside, strict=True))
    return manifest.tied.get(index.fqn, index.fqn), Box(offsets, lengths)


def _wants(part: Part, found: Located, box: Box, target: torch.Tensor) -> Iterator[Want]:
    max_gap_bytes = Job(part, (), found.piece.frozen).file.chunk_bytes
    offsets = tuple(a - b for a, b in zip(box.offsets, found.box.offsets, strict=True))
    for at, num_bytes, sink in sinks(found.piece, offsets, box.lengths, target, max_gap_bytes=max_gap_bytes):
        yield Want(found.start + at, num_bytes, sink)
