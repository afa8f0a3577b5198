"""HoldfastWriter: storage writer that saves Holdfast checkpoints in `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from msgspec.structs import replace
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.adapters.dcp.target import SaveClaim, Target, claim_save
from holdfast.checkpoint.format import names, part, values
from holdfast.checkpoint.format.agreement import agree
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text, parse_catalog
from holdfast.checkpoint.format.layout import (
    EvenPartitioning,
    FileLayout,
    ListedPartitioning,
    Partitioning,
    Region,
    Shard,
    check_name,
    lay_out,
)
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.value_index import INDEX, ValueIndex
from holdfast.checkpoint.home.commit import commit
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.persist import persist
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.state.tensors import NAMES, is_savable, torch_dtype, unsavable
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import HoldfastError, InvalidInput, SaveWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.documents import to_plain


def find_rule(shape: tuple[int, ...], rows: Sequence[tuple[int, Region]]) -> Partitioning:
    """Return the partitioning of (rank, region) pairs, by a rule if they are an even grid, else by a list."""
    return _partitioning(shape, tuple(sorted(rows, key=lambda row: (row[1], row[0]))))


@lru_cache(maxsize=64)  # hundreds of layers have tensors of the same few shapes, and share the result
def _partitioning(shape: tuple[int, ...], rows: tuple[tuple[int, Region], ...]) -> Partitioning:
    """Return the partitioning of sorted pairs; its rule splits each dimension once."""
    ranks = tuple(rank for rank, _ in rows)
    starts = [{region.offsets[dim] for _, region in rows} for dim in range(len(shape))]
    splits = tuple((dim, len(found)) for dim, found in enumerate(starts) if len(found) > 1)
    if len(set(ranks)) == len(rows) == math.prod(parts for _, parts in splits):
        even = EvenPartitioning(splits, ranks)
        if tuple(even.regions(shape)) == rows:
            return even
    return ListedPartitioning(rows)


def index_values(plans: Sequence[SavePlan]) -> ValueIndex:
    """Return the index of the values in all ranks' plans."""
    ranks: dict[str, int] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for rank, plan in enumerate(plans):
        paths_of_plan = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                ranks.setdefault(name, rank)
            path = tuple(paths_of_plan.get(name, (name,)))
            if path != tuple(name.split(".")):
                paths.setdefault(name, path)
    return ValueIndex(ranks, paths)


def make_catalog(plans: Sequence[SavePlan]) -> bytes:
    """Return the catalog that the parts of all ranks share."""
    found: dict[str, tuple[Shard, list[tuple[int, Region]]]] = {}
    for rank, plan in enumerate(plans):
        for _, shard in planned_shards(plan):
            first, rows = found.setdefault(shard.name, (shard, []))
            if (first.dtype, first.shape) != (shard.dtype, shard.shape):
                raise InvalidInput(
                    f"Ranks have different tensors {shard.name}: rank {rows[0][0]} has "
                    f"{first.dtype}{list(first.shape)}, rank {rank} has {shard.dtype}{list(shard.shape)}. "
                    "Nothing was written.",
                    rank=rank,
                    key=shard.name,
                )
            rows.append((rank, Region(shard.offsets, shard.sizes)))
    tensors: dict[str, Tensor] = {}
    for name, (shard, rows) in found.items():
        partitioning = find_rule(shard.shape, rows)
        holders = tuple(sorted({rank for rank, _ in rows}))
        tensors[name] = Tensor(shard.dtype, shard.shape, partitioning, holders)
    text = catalog_text(Catalog(tensors, {}))
    try:
        agree((text,), (0,) * len(plans))
    except InvalidInput as error:
        raise InvalidInput(f"{error} Nothing was written.", rank=error.rank, key=error.key) from error
    return text


def items_to_write(claim: SaveClaim, plan: SavePlan) -> list[tuple[WriteItem, Shard]]:
    """Return the shards that a rank writes, in the order of the catalog."""
    rank = claim.writer.rank
    planned = {(shard.name, shard.offsets): item for item, shard in planned_shards(plan)}
    items: list[tuple[WriteItem, Shard]] = []
    for shard in parse_catalog(claim.catalog, "the catalog of this save").shards_of(rank):
        item = planned.get((shard.name, shard.offsets))
        if item is None:
            raise Unsupported(
                f"Rank {rank} should write {shard.name} at {list(shard.offsets)}, but its planner's "
                "finish_plan() has dropped it. The save was cancelled. The planner must return the plan that "
                "it receives.",
                rank=rank,
                key=shard.name,
            )
        items.append((item, shard))
    return items


def planned_shards(plan: SavePlan) -> list[tuple[WriteItem, Shard]]:
    """Return the tensors that a rank is to write. Empty shards of tensors with elements are left out."""
    found = [(item, _shard(item)) for item in plan.items if item.type != WriteItemType.BYTE_IO]
    return [(item, shard) for item, shard in found if shard.num_bytes or 0 in shard.shape]


def _shard(item: WriteItem) -> Shard:
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    dtype = NAMES.get(data.properties.dtype)
    if dtype is None:
        raise Unsupported(
            f"{name} cannot be saved: the safetensors format has no dtype for {data.properties.dtype}. "
            "Nothing was written.",
            key=name,
        )
    check_name(name)
    return Shard(name, dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def encode_values(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """Return the values that a rank writes, as tagged JSON."""
    encoded: dict[str, Any] = {}
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            continue
        name = item.index.fqn
        if name == INDEX:
            raise InvalidInput(
                f"The key {INDEX!r} is reserved by the checkpoint format. Rename it.", key=name
            )
        look_up = getattr(planner, "lookup_object", None)
        if look_up is None:
            raise Unsupported(
                f"{name} is not a tensor, and {type(planner).__name__} returns it only as a pickle, which is "
                "never saved. Use DefaultSavePlanner or a subclass of it.",
                key=name,
            )
        encoded[name] = values.encode(look_up(item.index), name)
    return encoded


@torch.no_grad()
def stage(planner: SavePlanner, items: Sequence[tuple[WriteItem, Shard]], layout: FileLayout) -> memoryview:
    """Copy tensors into a new buffer with the bytes of a data file.

    Each is resolved, copied and released in turn.
    """
    memory = mmap.mmap(-1, layout.file_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages, which halve the cost of new memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[: len(layout.header)] = layout.header
    image = torch.frombuffer(memory, dtype=torch.uint8)
    for (item, shard), start in zip(items, layout.starts, strict=True):
        source = _check(planner.resolve_data(item), shard)
        target = image[start : start + shard.num_bytes].view(torch_dtype(shard.dtype)).view(shard.sizes)
        target.copy_(source.detach())
    return memoryview(memory)


def _check(source: object, shard: Shard) -> torch.Tensor:
    name = shard.name
    if not isinstance(source, torch.Tensor):
        raise Unsupported(f"{name} cannot be saved: it is a {type(source).__name__}, not a tensor.", key=name)
    if not is_savable(source):
        raise unsavable(source, name)
    if source.dtype is not torch_dtype(shard.dtype) or tuple(source.shape) != shard.sizes:
        raise InvalidInput(
            f"{name} was planned as {shard.dtype}{list(shard.sizes)} and is now "
            f"{source.dtype}{list(source.shape)}. It was changed during the save, which was cancelled.",
            key=name,
        )
    return source


class HoldfastWriter(StorageWriter):
    """Storage for `dcp.save` and `dcp.async_save`. It writes a Holdfast checkpoint, hashed and durable.

    Every rank writes one safetensors file with its tensors, and its part. When all are durable, the
    coordinator writes the manifest, which completes the checkpoint. Nothing is pickled.

    A `checkpoint_id` overrides the arguments: `HOME/step-N` is step N of that home, and anything else is a
        home.

    Args:
        home: folder or URL of this run's checkpoints. Each run needs its own home.
        step: number of completed optimizer steps; by default the step after the newest save in the home.
        keep: number of newest checkpoints to keep, a `Keep` policy, or None to keep all.
        overwrite: False refuses a save of a step that has a checkpoint, and without a step a save to a home
            that has one. True supersedes it with a warning; its files do not change.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: int | Keep | None = None,
        overwrite: bool = True,
    ) -> None:
        super().__init__()
        self._default = Target.of(home, step)
        self._target = self._default
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._overwrite = overwrite
        self._trainer = os.getpid()  # also when a save runs in a process beside the trainer
        self._claim: SaveClaim | None = None
        self._step: int | None = None

    @property
    def step(self) -> int | None:
        """Step that was saved last; None before the first save."""
        return self._step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, of `checkpoint_id` if it is not None."""
        self._target = self._default.at(checkpoint_id)
        self._claim = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the options of a save."""
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "dcp.save(use_collectives=False) cannot write a Holdfast checkpoint, because the coordinator "
                "must wait until every rank's file is durable. Leave use_collectives at its default."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check the plan of this rank."""
        _refuse_plan_caching(not getattr(plan, "usable", True))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the tensors of all ranks and claim an attempt, on the coordinator."""
        for plan in plans:
            _refuse_plan_caching(not getattr(plan, "usable", True))
        catalog, index = make_catalog(plans), index_values(plans).text()
        store = open_store(self._target.home)
        claim = claim_save(
            store, self._target.step, world_size=len(plans), trainer=self._trainer, overwrite=self._overwrite
        )
        own = self._claim = replace(claim, catalog=catalog, index=index)
        ranks = range(1, len(plans))
        others = [replace(own, writer=replace(own.writer, rank=rank), index="") for rank in ranks]
        return [
            dataclasses.replace(plan, storage_data=claim)
            for plan, claim in zip(plans, (own, *others), strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file and part.

        Blocks: until both files are durable. Memory: a copy of what this rank writes.
        """
        # Its cached plans contain the step and attempt of an earlier save.
        _refuse_plan_caching(bool(getattr(planner, "_enable_plan_caching", False)))
        claim = plan.storage_data
        if not isinstance(claim, SaveClaim):
            raise Unsupported(
                f"{type(planner).__name__} has dropped the plan's storage_data, which contains the step."
            )
        began = time.perf_counter()
        encoded = encode_values(plan, planner)
        self._step = step = claim.step
        attempt, rank = claim.writer.attempt, claim.writer.rank
        if rank == 0:
            encoded[INDEX] = claim.index
        items = items_to_write(claim, plan)
        layout = lay_out([shard for _, shard in items], rank)
        store = open_store(self._target.home)
        file = persist(store, names.data(step, attempt, rank), stage(planner, items, layout))
        facts = part.PartFacts(
            **to_plain(claim.writer), step=step, ancestors=claim.ancestors, values=encoded, own=()
        )
        draft = part.draft(facts, layout.starts, claim.catalog)
        store.put_once(names.part(step, attempt, rank), part.finish(draft, file))
        history = History(store, claim.writer)
        history.record("persisted", step=step, num_bytes=file.num_bytes, seconds=time.perf_counter() - began)
        done: Future[list[WriteResult]] = Future()
        sizes = {item.index: shard.num_bytes for item, shard in items}
        done.set_result([WriteResult(item.index, sizes.get(item.index, 0), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint and delete old ones, on the coordinator.

        All ranks' files are durable by then.

        Blocks: until the checkpoint is durable.
        """
        claim = self._claim
        assert claim is not None
        began = time.perf_counter()
        store, step = open_store(self._target.home), claim.step
        manifest = commit(store, claim.writer, step)
        history = History(store, claim.writer)
        history.record(
            "committed", step=step, num_bytes=manifest.data_bytes, seconds=time.perf_counter() - began
        )
        if self._keep.last is not None:
            self._retain(store, manifest, history)

    def _retain(self, store: Store, manifest: Manifest, history: History) -> None:
        """Delete checkpoints that `keep` does not keep. Other threads may be saving steps of this attempt."""
        newest = manifest.checkpoint_id
        try:
            unfinished = {
                one
                for one, saved in list_home(store).saved.items()
                if one.attempt == newest.attempt and not saved.is_committed
            }
            for deleted in Retention(store, self._keep).apply(newest, manifest.ancestors, unfinished):
                detail = f"attempt {deleted.attempt}, {'complete' if deleted.was_complete else 'half done'}"
                history.record("retained", step=deleted.step, detail=detail)
        except HoldfastError as error:
            history.record("retain-failed", step=newest.step, detail=str(error))
            warn(
                f"Step {newest.step} is durable, but older checkpoints could not be deleted: {error}",
                SaveWarning,
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a checkpoint id is a place that can be written to."""
        return Target.is_valid(checkpoint_id)


def _refuse_plan_caching(is_cached: bool) -> None:
    if is_cached:
        raise Unsupported(
            "DefaultSavePlanner(enable_plan_caching=True) reuses the plan of an earlier save, and with "
            "it that save's step. Nothing was written. Do not pass enable_plan_caching."
        )
