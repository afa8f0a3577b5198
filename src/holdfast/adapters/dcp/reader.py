"""HoldfastReader: storage reader that loads Holdfast checkpoints in `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from typing_extensions import override

from holdfast.adapters.dcp.target import Target
from holdfast.checkpoint.format import values as value_format
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Region, Shard
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.format.value_index import ValueIndex
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.documents import check_files, read_manifest
from holdfast.checkpoint.home.listing import candidates
from holdfast.checkpoint.home.newest import LIMIT_S, Patience, Skipped, from_listing, list_patiently, usable
from holdfast.checkpoint.restore.fill import CollectingSink, TensorSink
from holdfast.checkpoint.restore.parts import Located, Parts
from holdfast.checkpoint.restore.read import FileRead, Sink, Want, read
from holdfast.checkpoint.state.tensors import torch_dtype
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound, ResumeWarning, RetryLater
from holdfast.system.callsite import warn


class Span(NamedTuple):
    """Range of a row-major tensor that begins and ends with elements of a wanted region.

    `at` and `sizes` are the part of the wanted region in it, relative to that region. Within the span, its
    elements have the strides of the tensor.
    """

    start: int  # element of the tensor
    num_items: int
    at: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """True if the span contains only wanted elements."""
        return self.num_items == math.prod(self.sizes)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def spans(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], max_gap: int
) -> Iterator[Span]:
    """Yield the spans of a region that is not empty. Gaps of at most `max_gap` elements are read too."""
    strides = strides_of(shape)
    extents = [1]  # elements from the first to the last of the region, in this dimension and those after it
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        extents.insert(0, extents[0] + (n - 1) * stride)
    # Gaps of inner dimensions are never larger, so the outer ones are divided, up to the first small gap.
    gaps = [stride - inner for stride, inner in zip(strides, extents[1:], strict=True)]
    cut = next((dim for dim, n in enumerate(sizes) if n > 1 and gaps[dim] <= max_gap), len(sizes))
    start = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
    for index in itertools.product(*map(range, sizes[:cut])):
        moved = sum(at * stride for at, stride in zip(index, strides, strict=False))
        at = (*index, *(0,) * (len(sizes) - cut))
        yield Span(start + moved, extents[cut], at, (*(1,) * cut, *sizes[cut:]))


def make_sinks(
    shard: Shard,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    target: torch.Tensor,
    *,
    max_gap_bytes: int,
) -> Iterator[tuple[int, int, Sink]]:
    """Yield (byte in the shard, number of bytes, sink) for every span of a region."""
    if tuple(target.shape) != sizes:
        raise InvalidInput(
            f"{shard.name} has shape {list(sizes)}, but the tensor to load it into has {list(target.shape)}.",
            key=shard.name,
        )
    if not math.prod(sizes):
        return
    item_bytes, dtype = ITEM_BYTES[shard.dtype], torch_dtype(shard.dtype)
    strides = strides_of(shard.sizes)
    for span in spans(shard.sizes, offsets, sizes, max_gap_bytes // item_bytes):
        part = target
        for dim, (at, length) in enumerate(zip(span.at, span.sizes, strict=True)):
            part = part.narrow(dim, at, length)
        is_direct = span.is_dense and part.is_cpu and part.dtype is dtype and part.is_contiguous()
        sink = TensorSink(part) if is_direct else _gathering_sink(span, strides, dtype, part)
        yield span.start * item_bytes, span.num_items * item_bytes, sink


def _gathering_sink(
    span: Span, strides: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor
) -> CollectingSink:
    """Return a sink that collects a span, then copies its wanted elements into a tensor."""

    def copy(items: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(items.as_strided(span.sizes, strides))

    return CollectingSink((span.num_items,), dtype, copy)


@dataclass(slots=True)
class _Opened:
    """Checkpoint that is being loaded. Its parts are read on demand."""

    store: Store
    manifest: Manifest
    parts: Parts
    index: ValueIndex

    @property
    def id(self) -> str:
        return self.manifest.id


class HoldfastReader(StorageReader):
    """Storage for `dcp.load`. It reads Holdfast checkpoints of any layout and number of ranks.

    Only the chunks that are needed are read, and each is hashed before it is used. Nothing is unpickled.
    Damage raises an error with the file and the tensor. Tensors may be partly loaded then: load an older
    step.

    A `checkpoint_id` overrides the arguments: `HOME/step-N` is step N of that home, and anything else is a
        home.

    Args:
        home: folder or URL with the run's checkpoints.
        step: step to load; by default the newest complete checkpoint.
        num_threads: threads of each rank that read, hash and copy.
    """

    def __init__(
        self, home: str | os.PathLike[str], *, step: int | None = None, num_threads: int = 4
    ) -> None:
        super().__init__()
        self._default = Target.of(home, step)
        self._target = self._default
        self._num_threads = num_threads
        self._opened: _Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of `checkpoint_id` if it is not None."""
        self._target = self._default.at(checkpoint_id)
        self._opened = None

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that was loaded last; None before the first load."""
        return None if self._opened is None else self._opened.manifest.step

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Choose the checkpoint, and read its manifest and the part of rank 0."""
        self._opened = opened = _open(self._target)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = dict(_tensors(opened))
        entries.update((name, BytesStorageMetadata()) for name in opened.index.ranks)
        paths = {name: opened.index.path(name) for name in entries}
        return Metadata(entries, planner_data=paths, storage_meta=StorageMeta(self._target.home))

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add this rank's choice of checkpoint to the plan."""
        opened = self._current()
        plan.storage_data = (opened.id, opened.manifest.step)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have chosen the same checkpoint."""
        chosen = {plan.storage_data for plan in plans}
        if len(chosen) > 1:
            steps = sorted(step for _, step in chosen)
            raise RetryLater(
                f"The ranks have chosen different checkpoints of {self._target.home} (steps {steps}): one "
                "was saved or deleted meanwhile. Nothing was loaded. Load again, or pass step=."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify what this rank needs.

        Blocks: until everything is read.
        """
        opened = self._current()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _save_value(opened, item.storage_index))
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

    def _current(self) -> _Opened:
        assert self._opened is not None, "read_metadata() comes first"
        return self._opened

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a checkpoint id is a place that can be read."""
        return Target.is_valid(checkpoint_id)


def _open(target: Target) -> _Opened:
    store = open_store(target.home)
    patience = Patience(LIMIT_S, lambda line: warn(line, ResumeWarning))

    def read() -> _Opened:
        return _open_listed(store, target, patience)

    return read() if target.step is not None else from_listing(read)


def _open_listed(store: Store, target: Target, patience: Patience) -> _Opened:
    home = list_patiently(store, patience)
    every = candidates(home)
    matching = [one for one in every if target.step in (None, one.step)]
    if not matching:
        wanted = "checkpoint" if target.step is None else f"checkpoint of step {target.step}"
        steps = ", ".join(str(one.step) for one in every[:20]) or "none"
        raise NotFound(
            f"{store.url} has no complete {wanted}. Complete steps, newest first: {steps}.", step=target.step
        )
    run = patience.spend(store.url, lambda: _run_id(store))
    skipped: list[Skipped] = []
    errors: list[HoldfastError] = []

    def record(one: Skipped, error: HoldfastError) -> None:
        skipped.append(one)
        errors.append(error)

    def open_one(one: CheckpointId) -> _Opened:
        manifest = read_manifest(store, one, run)
        check_files([home], manifest)
        parts = Parts(store, manifest)
        return _Opened(store, manifest, parts, parts.value_index() or ValueIndex({}, {}))

    for opened in usable(matching, open_one, url=store.url, patience=patience, on_skipped=record):
        for one in skipped:
            warn(
                f"Step {opened.manifest.step} is loaded, because step {one.step} of attempt {one.attempt} is "
                f"damaged: {one.reason}",
                ResumeWarning,
            )
        return opened
    raise errors[0]


def _run_id(store: Store) -> str | None:
    try:
        found = read_run(store)
    except Corrupt:
        return None  # manifests have seals of their own, so a damaged run document does not matter
    return found.id if found else None


def _tensors(opened: _Opened) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """Yield DCP's metadata of each tensor and alias. Per-rank tensors are those of the first rank."""
    tied = opened.manifest.tied
    for name in [*opened.manifest.tensors, *tied]:
        tensor = opened.manifest.tensors[tied.get(name, name)]
        found = opened.parts.shape_of(tied.get(name, name), 0)
        if found is None:
            continue
        dtype, shape = found
        regions = (
            [Region.whole(shape)]
            if tensor.partitioning is None
            else [region for _, region in tensor.partitioning.regions(shape)]
        )
        chunks = {
            region.offsets: ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
            for region in regions
            if region.num_items or 0 in shape
        }
        properties = TensorProperties(dtype=torch_dtype(dtype))
        yield name, TensorStorageMetadata(properties, torch.Size(shape), list(chunks.values()))


def _save_value(opened: _Opened, index: MetadataIndex) -> io.BytesIO:
    """Return a value in a file of torch.save in memory, as planners expect it."""
    part = opened.parts.part(opened.index.ranks[index.fqn])
    try:
        value = value_format.decode(part.values[index.fqn])
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise Corrupt(
            f"The value {index.fqn} of step {opened.manifest.step} cannot be decoded: {error!r}.",
            step=opened.manifest.step,
            key=index.fqn,
        ) from error
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _jobs(parts: Parts, targets: Iterable[tuple[ReadItem, torch.Tensor]]) -> list[FileRead]:
    """Return the reads of each file."""
    wanted: dict[tuple[int, bool], list[Want]] = {}
    for item, target in targets:
        name, region = _saved_region(parts.manifest, item)
        if not region.num_items:
            continue
        # Each item has one shard, because items are made from the regions in the metadata.
        for found in parts.shards_of(name, 0, region):
            key = found.rank, found.shard.frozen
            wanted.setdefault(key, []).extend(_wants(parts.part(found.rank), found, region, target))
    return [FileRead(parts.part(rank), wants, frozen) for (rank, frozen), wants in wanted.items()]


def _saved_region(manifest: Manifest, item: ReadItem) -> tuple[str, Region]:
    """Return the saved tensor and the region of it that an item reads."""
    index = item.storage_index
    inside, sizes = tuple(item.storage_offsets), tuple(item.lengths)
    chunk = (0,) * len(inside) if index.offset is None else tuple(index.offset)
    offsets = tuple(a + b for a, b in zip(chunk, inside, strict=True))
    return manifest.tied.get(index.fqn, index.fqn), Region(offsets, sizes)


def _wants(part: Part, found: Located, region: Region, target: torch.Tensor) -> Iterator[Want]:
    max_gap_bytes = FileRead(part, (), found.shard.frozen).file.chunk_bytes
    offsets = tuple(a - b for a, b in zip(region.offsets, found.region.offsets, strict=True))
    for at, num_bytes, sink in make_sinks(
        found.shard, offsets, region.sizes, target, max_gap_bytes=max_gap_bytes
    ):
        yield Want(found.start + at, num_bytes, sink)
