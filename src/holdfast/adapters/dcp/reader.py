"""HoldfastReader: storage reader that loads Holdfast checkpoints in `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
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
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.format.value_index import ValueIndex
from holdfast.checkpoint.home.documents import check_files
from holdfast.checkpoint.home.newest import LIMIT_S, Patience, from_listing
from holdfast.checkpoint.restore.checkpoint import choose, list_matching
from holdfast.checkpoint.restore.fill import collecting_sink, tensor_sink
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import FileRead, Sink, Want, read
from holdfast.checkpoint.state.tensors import torch_dtype
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, InvalidInput, ResumeWarning, RetryLater
from holdfast.system.callsite import warn


def make_sinks(
    shard: Shard, region: Region, target: torch.Tensor, *, max_gap_bytes: int
) -> Iterator[tuple[int, int, Sink]]:
    """Yield (byte in the shard, number of bytes, sink) for each run of elements of a region of a shard.

    A run begins and ends with elements of the region. Gaps of at most `max_gap_bytes` are read too.
    """
    if tuple(target.shape) != region.sizes:
        raise InvalidInput(
            f"{shard.name} has shape {list(region.sizes)}, but the tensor to load it into has "
            f"{list(target.shape)}.",
            key=shard.name,
        )
    if not region.num_items:
        return
    item_bytes, dtype = ITEM_BYTES[shard.dtype], torch_dtype(shard.dtype)
    saved = torch.empty(shard.sizes, dtype=dtype, device="meta")[region.slices]
    extents = [1]  # elements from the first to the last of the region, in this dimension and those after it
    for n, stride in zip(reversed(region.sizes), reversed(saved.stride()), strict=True):
        extents.insert(0, extents[0] + (n - 1) * stride)
    # Gaps of inner dimensions are never larger, so the outer ones are divided, up to the first small gap.
    gaps = [(stride - inner) * item_bytes for stride, inner in zip(saved.stride(), extents[1:], strict=True)]
    sizes = enumerate(region.sizes)
    cut = next((dim for dim, n in sizes if n > 1 and gaps[dim] <= max_gap_bytes), len(gaps))
    num_items = extents[cut]
    for index in itertools.product(*map(range, region.sizes[:cut])):
        run, part = saved[index], target[index]
        is_dense = num_items == run.numel() and part.is_contiguous()
        if is_dense and part.is_cpu and part.dtype is dtype:
            sink: Sink = tensor_sink(part)
        else:
            sink = collecting_sink((num_items,), dtype, partial(_copy_run, run, part))
        yield int(run.storage_offset()) * item_bytes, num_items * item_bytes, sink


@torch.no_grad()
def _copy_run(run: torch.Tensor, target: torch.Tensor, items: torch.Tensor) -> None:
    """Copy the wanted elements of a run, whose shape and strides are those of the meta tensor `run`."""
    target.copy_(items.as_strided(run.shape, run.stride()))


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
        self._parts: Parts | None = None  # of the checkpoint that is being loaded, read on demand
        self._index = _NO_VALUES

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of `checkpoint_id` if it is not None."""
        self._target = self._default.at(checkpoint_id)
        self._parts = None

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that was loaded last; None before the first load."""
        return None if self._parts is None else self._parts.manifest.step

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Choose the checkpoint, and read its manifest and the part of rank 0."""
        self._parts, self._index = _open(self._target)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = dict(_tensors(self._parts))
        entries.update((name, BytesStorageMetadata()) for name in self._index.ranks)
        paths = {name: self._index.path(name) for name in entries}
        return Metadata(entries, planner_data=paths, storage_meta=StorageMeta(self._target.home))

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add this rank's choice of checkpoint to the plan."""
        manifest = self._current().manifest
        plan.storage_data = (manifest.id, manifest.step)
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
        parts = self._current()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                planner.load_bytes(item, _save_value(parts.part(self._index.ranks[name]), name))
        targets = [
            (item, planner.resolve_tensor(item).detach())
            for item in plan.items
            if item.type == LoadItemType.TENSOR
        ]
        read(parts.store, _jobs(parts, targets), num_threads=self._num_threads)
        for item, target in targets:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _current(self) -> Parts:
        assert self._parts is not None, "read_metadata() comes first"
        return self._parts

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a checkpoint id is a place that can be read."""
        return Target.is_valid(checkpoint_id)


_NO_VALUES = ValueIndex({}, {})


def _open(target: Target) -> tuple[Parts, ValueIndex]:
    store = open_store(target.home)
    patience = Patience(LIMIT_S, lambda line: warn(line, ResumeWarning))
    choose = partial(_choose, store, target, patience)
    return choose() if target.step is not None else from_listing(choose)


def _choose(store: Store, target: Target, patience: Patience) -> tuple[Parts, ValueIndex]:
    home, matching = list_matching(store, patience, target.step)

    def load(manifest: Manifest) -> tuple[Parts, ValueIndex]:
        check_files([home], manifest)
        parts = Parts(store, manifest)
        return parts, parts.value_index() or _NO_VALUES

    opened, skipped = choose(store, matching, load, patience)
    for skip in skipped:
        warn(
            f"Step {opened[0].manifest.step} is loaded, because step {skip.step} of attempt {skip.attempt} "
            f"is damaged: {skip.reason}",
            ResumeWarning,
        )
    return opened


def _tensors(parts: Parts) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """Yield DCP's metadata of each tensor and alias. Per-rank tensors are those of the first rank."""
    tied = parts.manifest.tied
    for name in [*parts.manifest.tensors, *tied]:
        tensor = parts.manifest.tensors[tied.get(name, name)]
        found = parts.shape_of(tied.get(name, name), 0)
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


def _save_value(part: Part, name: str) -> io.BytesIO:
    """Return a value in a file of torch.save in memory, as planners expect it."""
    try:
        value = value_format.decode(part.values[name])
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        message = f"The value {name} of step {part.step} cannot be decoded: {error!r}."
        raise Corrupt(message, step=part.step, key=name) from error
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
            wants = wanted.setdefault((found.rank, found.shard.frozen), [])
            gap = FileRead(parts.part(found.rank), wants, found.shard.frozen).file.chunk_bytes
            inside = Region(tuple(map(int.__sub__, region.offsets, found.shard.region.offsets)), region.sizes)
            for at, num_bytes, sink in make_sinks(found.shard, inside, target, max_gap_bytes=gap):
                wants.append(Want(found.start + at, num_bytes, sink))
    return [FileRead(parts.part(rank), wants, frozen) for (rank, frozen), wants in wanted.items()]


def _saved_region(manifest: Manifest, item: ReadItem) -> tuple[str, Region]:
    """Return the saved tensor and the region of it that an item reads."""
    index = item.storage_index
    inside, sizes = tuple(item.storage_offsets), tuple(item.lengths)
    chunk = (0,) * len(inside) if index.offset is None else tuple(index.offset)
    return manifest.tied.get(index.fqn, index.fqn), Region(tuple(map(int.__add__, chunk, inside)), sizes)
