"""HoldfastReader: `torch.distributed.checkpoint` loads Holdfast checkpoints through it, verified."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
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

from holdfast.adapters.dcp.documents import PATHS, paths_in
from holdfast.adapters.dcp.gather import sinks
from holdfast.adapters.dcp.place import Place
from holdfast.errors import Corrupt, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.format import values as value_format
from holdfast.format.layout import Piece
from holdfast.format.manifest import Manifest
from holdfast.restore import find
from holdfast.restore.fill import torch_dtype
from holdfast.restore.parts import Parts
from holdfast.restore.read import Job, Want, read
from holdfast.store import open_store
from holdfast.store.contract import Store


@dataclass(slots=True)
class _Opened:
    """The checkpoint that is being loaded: where each region and each value of it is."""

    store: Store
    manifest: Manifest
    parts: Parts
    regions: dict[tuple[str, tuple[int, ...]], tuple[int, Piece, int]]  # rank, piece, start in its file
    values: dict[str, Any]  # tagged JSON
    paths: dict[str, tuple[str | int, ...]]

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
        """See StorageReader: choose the checkpoint, read its manifest and parts.

        Raises:
            NotFound: no complete checkpoint, or none of that step.
            Corrupt: manifest or parts are damaged, and there is no other.
            RetryLater: the store failed.
        """
        self._opened = opened = _open(self._place)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for (name, offsets), (_, piece, _) in opened.regions.items():
            entry = entries.setdefault(
                name,
                TensorStorageMetadata(
                    TensorProperties(dtype=torch_dtype(piece.dtype)), torch.Size(piece.shape), []
                ),
            )
            assert isinstance(entry, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.lengths))
            entry.chunks.append(chunk)
        entries.update({name: BytesStorageMetadata() for name in opened.values})
        paths = {name: opened.paths.get(name, tuple(name.split("."))) for name in entries}
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
        jobs = [Job(opened.parts.part(rank), wants) for rank, wants in _wanted(opened, targets).items()]
        read(opened.store, jobs, num_threads=self._num_threads)
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
    home = find.list_home(store)
    matching = [(a, s) for a, s in find.candidates(home) if place.step in (None, s)]
    if not matching:
        asked = "checkpoint" if place.step is None else f"checkpoint of step {place.step}"
        steps = ", ".join(str(step) for _, step in find.candidates(home)[:20]) or "none"
        message = f"{store.url} holds no complete {asked}. Complete steps, newest first: {steps}."
        raise NotFound(message, step=place.step)
    run = _run_id(store)
    errors: list[HoldfastError] = []
    for attempt, step in matching:
        try:
            manifest = find.read_manifest(store, step, attempt, run)
            find.check_files(home, manifest)
            return _index(store, manifest)
        except (Corrupt, NotFound, Unsupported) as error:
            errors.append(error)
    raise errors[0]


def _run_id(store: Store) -> str | None:
    try:
        found = find.read_run(store)
    except Corrupt:
        return None  # the manifests are sealed on their own; a damaged run document must not lock them in
    return found.id if found else None


def _index(store: Store, manifest: Manifest) -> _Opened:
    """Where every region and value of a checkpoint is; of per-rank tensors, the first rank's."""
    parts = Parts(store, manifest)
    regions: dict[tuple[str, tuple[int, ...]], tuple[int, Piece, int]] = {}
    for name in [*manifest.tensors, *manifest.tied]:
        if parts.shape_of(manifest.tied.get(name, name), 0) is None:
            continue
        for rank, piece, start in parts.pieces_of(manifest.tied.get(name, name), 0):
            if piece.num_bytes or 0 in piece.shape:
                regions[name, piece.offsets] = rank, piece, start
    values: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for rank in range(manifest.world_size):
        held = parts.part(rank).values
        if PATHS in held:  # else values of a Checkpointer, which are trees by object, not names
            values.update({name: value for name, value in held.items() if name != PATHS})
            paths.update(paths_in(held[PATHS]))
    return _Opened(store, manifest, parts, regions, values, paths)


def _as_torch_saves(opened: _Opened, index: MetadataIndex) -> io.BytesIO:
    """A value as planners expect it. It is pickled here, in memory, from what plain JSON says."""
    encoded = opened.values[index.fqn]
    try:
        value = value_format.decode(encoded)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        message = f"The value {index.fqn} of step {opened.manifest.step} cannot be decoded: {error!r}."
        raise Corrupt(message, step=opened.manifest.step, key=index.fqn) from error
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _wanted(opened: _Opened, targets: list[tuple[ReadItem, torch.Tensor]]) -> dict[int, list[Want]]:
    """What must be read from the file of each rank."""
    wanted: dict[int, list[Want]] = {}
    for item, target in targets:
        index = item.storage_index
        rank, piece, start = opened.regions[index.fqn, tuple(index.offset or ())]
        chunk_bytes = opened.parts.part(rank).file.chunk_bytes
        wanted.setdefault(rank, []).extend(_wants(item, piece, start, chunk_bytes, target))
    return wanted


def _wants(
    item: ReadItem, piece: Piece, start: int, chunk_bytes: int, target: torch.Tensor
) -> Iterator[Want]:
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    for at, num_bytes, sink in sinks(piece, offsets, lengths, target, max_gap_bytes=chunk_bytes):
        yield Want(start + at, num_bytes, sink)
