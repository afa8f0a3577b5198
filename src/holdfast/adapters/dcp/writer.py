"""HoldfastWriter: `torch.distributed.checkpoint` saves through it into ordinary Holdfast checkpoints."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.adapters.dcp import documents
from holdfast.adapters.dcp.claim import Claim, claim
from holdfast.adapters.dcp.image import stage
from holdfast.adapters.dcp.place import Place
from holdfast.callsite import warn
from holdfast.errors import Conflict, HoldfastError, InvalidInput, SaveWarning, Unsupported
from holdfast.format import names
from holdfast.format.layout import lay_out
from holdfast.format.manifest import Manifest
from holdfast.home.commit import commit
from holdfast.home.history import History
from holdfast.home.listing import list_home
from holdfast.home.retain import Retention
from holdfast.home.writer import WriterId
from holdfast.keeper.persist import persist
from holdfast.policy import Keep
from holdfast.store import Store, open_store


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share in a save: travels from the coordinator to the rank inside its plan."""

    claim: Claim
    rank: int
    catalog: bytes = field(repr=False)  # what all ranks write
    index: str = ""  # of all ranks' values; only rank 0 keeps it

    @property
    def writer(self) -> WriterId:
        """Identity under which the rank commits and records."""
        return WriterId(self.claim.run, self.claim.attempt, self.rank, self.claim.world_size)


class HoldfastWriter(StorageWriter):
    """Storage for `dcp.save` and `dcp.async_save`: writes a Holdfast checkpoint, hashed and durable.

    Every rank writes one safetensors file with the tensors that the planner gives it, and its part. When all
    are durable the coordinator writes the manifest; before that there is no checkpoint. Nothing is pickled.

    A `checkpoint_id` overrides the arguments: `HOME/step-N` is step N of that home, anything else is a home.

    Args:
        home: folder that holds this run's checkpoints; one run, one home.
        step: optimizer steps completed.
        keep: how many of the newest checkpoints stay, a `Keep` policy, or None for all.

    Raises:
        InvalidInput: an argument cannot be used.
    """

    def __init__(
        self, home: str | os.PathLike[str], *, step: int | None = None, keep: int | Keep | None = None
    ) -> None:
        super().__init__()
        self._given = Place.of(home, step)
        self._place = self._given
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._trainer = os.getpid()  # stays that when a save runs in a process beside the trainer
        self._share: Share | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See StorageWriter: begin another save, of `checkpoint_id` if one is given."""
        self._place = self._given.at(checkpoint_id)
        self._share = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter.

        Raises:
            InvalidInput: no step was given.
            Unsupported: a save without collectives: ranks that do not meet cannot become one checkpoint.
        """
        self._step()
        if not kwargs.get("use_collectives", True):
            message = (
                "dcp.save(use_collectives=False) cannot write a Holdfast checkpoint: the coordinator must "
                "know that every rank's file is durable. Leave use_collectives at its default."
            )
            raise Unsupported(message)

    def _step(self) -> int:
        if self._place.step is None:
            message = (
                f"No step was given for the checkpoint in {self._place.home!r}. Nothing was written. Pass "
                "HoldfastWriter(home, step=500), or a checkpoint_id that ends with /step-500."
            )
            raise InvalidInput(message)
        return self._place.step

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter.

        Raises:
            Unsupported: the planner's plan cache is on.
        """
        _refuse_caching(not getattr(plan, "usable", True))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See StorageWriter: on the coordinator, check what is to be written and claim its attempt.

        Raises:
            Conflict: another trainer has taken this home over.
            InvalidInput, Unsupported: a tensor that cannot be saved, by name; nothing was written.
            RetryLater: the store failed.
        """
        for plan in plans:
            _refuse_caching(not getattr(plan, "usable", True))
        catalog, index = documents.catalog_of(plans), documents.Index.of(plans).text()
        store = open_store(self._place.home)
        agreed = claim(store, self._step(), world_size=len(plans), trainer=self._trainer)
        self._share = Share(agreed, 0, catalog, index)
        others = [Share(agreed, rank, catalog) for rank in range(1, len(plans))]
        return [
            dataclasses.replace(plan, storage_data=share)
            for plan, share in zip(plans, (self._share, *others), strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter: this rank's data file and part.

        Raises:
            InvalidInput, Unsupported: a value or tensor that cannot be saved, by name.
            RetryLater: the store failed.

        Blocks: until both files are durable. Needs memory for one copy of what this rank writes.
        """
        # Its finished plans are of an earlier save and would bring that save's step and attempt along.
        _refuse_caching(bool(getattr(planner, "_enable_plan_caching", False)))
        share = plan.storage_data
        if not isinstance(share, Share):
            message = f"{type(planner).__name__} has lost the plan's storage_data, so the step is not known."
            raise Unsupported(message)
        began = time.perf_counter()
        encoded = documents.values_of(plan, planner)
        if share.rank == 0:
            encoded[documents.INDEX] = share.index
        placed = documents.placed_in(share.catalog, plan, share.rank)
        layout = lay_out([piece for _, piece in placed], share.rank)
        store = open_store(self._place.home)
        step, attempt, rank = share.claim.step, share.claim.attempt, share.rank
        file = persist(store, names.data(step, attempt, rank), stage(planner, placed, layout))
        document = documents.part_document(share.claim, rank, share.catalog, layout.starts, file, encoded)
        _create(store, names.part(step, attempt, rank), document)
        history = History(store, share.writer)
        history.record("persisted", step=step, num_bytes=file.num_bytes, seconds=time.perf_counter() - began)
        done: Future[list[WriteResult]] = Future()
        sizes = {item.index: piece.num_bytes for item, piece in placed}
        done.set_result([WriteResult(item.index, sizes.get(item.index, 0), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See StorageWriter: on the coordinator, when all ranks' files are durable, commit and retain.

        Raises:
            Conflict: a newer attempt has taken over; there is no checkpoint.
            InvalidInput: the ranks' parts do not fit together; there is no checkpoint.
            Corrupt: a part is damaged; there is no checkpoint.
            RetryLater: the store failed.

        Blocks: until the checkpoint is durable.
        """
        assert self._share is not None
        began = time.perf_counter()
        store, step = open_store(self._place.home), self._share.claim.step
        writer = self._share.writer
        manifest = commit(store, writer, step)
        history = History(store, writer)
        history.record(
            "committed", step=step, num_bytes=manifest.data_bytes, seconds=time.perf_counter() - began
        )
        if self._keep.last is not None:
            self._retain(store, manifest, history)

    def _retain(self, store: Store, manifest: Manifest, history: History) -> None:
        """Delete what need not stay; other saves of this attempt may be on their way in other threads."""
        newest = manifest.attempt, manifest.step
        try:
            there = list_home(store).saved.values()
            in_work = {
                (one.attempt, one.step) for one in there if one.attempt == newest[0] and not one.is_committed
            }
            for deleted in Retention(store, self._keep).apply(newest, manifest.ancestors, in_work):
                detail = f"attempt {deleted.attempt}, {'complete' if deleted.was_complete else 'half done'}"
                history.record("retained", step=deleted.step, detail=detail)
        except HoldfastError as error:
            history.record("retain-failed", step=newest[1], detail=str(error))
            message = f"Step {newest[1]} is durable, but older checkpoints could not be deleted: {error}"
            warn(message, SaveWarning)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See StorageWriter: True if this names a place that can be written to."""
        try:
            open_store(Place.of("", None).at(checkpoint_id).home)
        except HoldfastError:
            return False
        return True


def _create(store: Store, name: str, document: bytes) -> None:
    try:
        store.put(name, document, if_absent=True)
    except Conflict:
        if store.get(name) != document:
            raise


def _refuse_caching(is_cached: bool) -> None:
    if is_cached:
        message = (
            "DefaultSavePlanner(enable_plan_caching=True) hands every save the plan of an earlier one, and "
            "with it that one's step. Nothing was written. Leave enable_plan_caching out."
        )
        raise Unsupported(message)
