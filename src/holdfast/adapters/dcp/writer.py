"""HoldfastWriter: storage writer that saves Holdfast checkpoints in `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.adapters.dcp import documents
from holdfast.adapters.dcp.target import SaveClaim, Target, claim_save
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.layout import FileLayout, Shard, lay_out
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.value_index import INDEX
from holdfast.checkpoint.home.commit import commit
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.persist import persist
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.state.tensors import PLAIN, torch_dtype
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import HoldfastError, InvalidInput, SaveWarning, Unsupported
from holdfast.system.callsite import warn


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
    if type(source) not in PLAIN or not isinstance(source, torch.Tensor):
        kind = type(source)
        raise Unsupported(
            f"{name} cannot be saved: it is a {kind.__module__}.{kind.__qualname__}, not a plain tensor.",
            key=name,
        )
    if source.layout is not torch.strided or source.is_meta:
        reason = "the meta device" if source.is_meta else f"layout {source.layout}"
        raise Unsupported(f"{name} cannot be saved: it does not have dense memory ({reason}).", key=name)
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
        catalog, index = documents.make_catalog(plans), documents.index_values(plans).text()
        store = open_store(self._target.home)
        claim = claim_save(
            store, self._target.step, world_size=len(plans), trainer=self._trainer, overwrite=self._overwrite
        )
        own = self._claim = replace(claim, catalog=catalog, index=index)
        ranks = range(1, len(plans))
        others = [replace(own, writer=replace(own.writer, rank=rank), index="") for rank in ranks]
        return [replace(plan, storage_data=claim) for plan, claim in zip(plans, (own, *others), strict=True)]

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
        encoded = documents.encode_values(plan, planner)
        self._step = step = claim.step
        attempt, rank = claim.writer.attempt, claim.writer.rank
        if rank == 0:
            encoded[INDEX] = claim.index
        items = documents.items_to_write(claim, plan)
        layout = lay_out([shard for _, shard in items], rank)
        store = open_store(self._target.home)
        file = persist(store, names.data(step, attempt, rank), stage(planner, items, layout))
        document = documents.make_part(claim, layout.starts, file, encoded)
        store.put_once(names.part(step, attempt, rank), document)
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
