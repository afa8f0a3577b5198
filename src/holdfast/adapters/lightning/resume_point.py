"""Resume point: the generators and data positions of all ranks, as an entry of Lightning's checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from holdfast.adapters.lightning.data_position import (
    DataPosition,
    PositionedLoader,
    capture_generators,
    set_generators,
)
from holdfast.adapters.lightning.packages import EPOCH_CALLBACKS, DataLoaderIterDataFetcher
from holdfast.errors import InvalidInput, Unsupported
from holdfast.train.data import Batches

KEY = "holdfast"
"""Key of the entry in the checkpoint."""


def capture_point(trainer: Any) -> dict[str, Any]:
    """Return the resume point of all ranks, to be saved by rank 0.

    Ranks: collective.
    """
    loader = trainer.fit_loop._combined_loader
    own: dict[str, Any] = {"generators": capture_generators(), "position": None}
    if isinstance(loader, PositionedLoader):
        reach_batch(trainer)
        own = {"generators": loader.capture(), "position": _position(trainer, loader)}
        own["batches"] = [one.state_dict() for one in loader.batches]
    return {"ranks": _gather(own)}


def reach_batch(trainer: Any) -> None:
    """Record in GlobalBatches of the training data that training has used its batch."""
    loader = trainer.fit_loop._combined_loader
    if isinstance(loader, PositionedLoader):
        loader.reach(num_used(trainer))


def num_used(trainer: Any) -> int:
    """Return the number of batches that training has used in this epoch."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def has_begun(trainer: Any) -> bool:
    """Return True if a batch may have begun while it is read: `training_step(dataloader_iter)` reads it."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return progress.ready != progress.completed or isinstance(
        trainer.fit_loop._data_fetcher, DataLoaderIterDataFetcher
    )


def _position(trainer: Any, loader: PositionedLoader) -> dict[str, Any]:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_in_epoch = not (progress.is_last_batch or trainer.fit_loop.epoch_loop._num_ready_batches_reached())
    found = loader.position(progress.current.ready) if is_in_epoch else DataPosition(0)
    return {**asdict(found), "loaders": list(found.loaders)}


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [own]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def complete_batch(checkpoint: dict[str, Any]) -> bool:
    """Mark a checkpoint's batch as complete if it was saved at its end.

    Lightning resumes such a checkpoint with the next batch. If validation or the end of the epoch is next,
    it skips them, so that random numbers and schedules differ from an uninterrupted run.

    Returns:
        True if the batch was marked: `finish_batch` has to be called when training begins.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return False
    total, current = progress["total"], progress["current"]
    if not total["completed"] + 1 == total["processed"] == total["started"] == total["ready"]:
        return False
    total["completed"] += 1
    current["completed"] += 1
    return True


def finish_batch(trainer: Any) -> None:
    """Finish the batch of the checkpoint in the first iteration: run validation and whatever else is due."""
    loop = trainer.fit_loop.epoch_loop
    loop.advance = _FinishedBatch(loop)


@dataclass(frozen=True, slots=True)
class _FinishedBatch:
    """First iteration of a resumed loop: its batch was trained before, and only its end is missing."""

    loop: Any

    def __call__(self, data_fetcher: Any) -> None:
        """Do nothing, and let the next iteration read a batch."""
        del self.loop.advance
        self.loop.val_loop.restarting = False


def begin_epoch(trainer: Any) -> None:
    """Have callbacks of beginning epochs act in the epoch that training resumes in."""
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    groups = [group for one in trainer.optimizers for group in one.param_groups]
    rates = [group["lr"] for group in groups]
    for callback in trainer.callbacks:
        if isinstance(callback, EPOCH_CALLBACKS):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, rate in zip(groups, rates, strict=True):  # a new scheduler of averaging has set its own
        group["lr"] = rate


def restore_point(trainer: Any, point: dict[str, Any]) -> str | None:
    """Restore this rank's generators and data position, just before training.

    Returns:
        The reason why training continues with other random numbers, or None.
    """
    loader = trainer.fit_loop._combined_loader
    if isinstance(loader, PositionedLoader) and loader.batches:
        _restore_batches(loader, point["ranks"][0])  # the same on all ranks
    if (num_ranks := len(point["ranks"])) != trainer.world_size:
        if isinstance(loader, PositionedLoader) and not loader.batches and loader.has_length:
            _continue_on_other_ranks(trainer, loader, point["ranks"])
        return (
            f"The checkpoint was saved by {num_ranks} ranks, and is loaded on {trainer.world_size}. Training "
            "continues after the same share of the epoch. Random number generators were not restored, so it "
            "differs from an uninterrupted run, and data that is shuffled in another order for other ranks "
            "may be used twice or not at all in this epoch. GlobalBatches keep one order."
        )
    own = point["ranks"][trainer.global_rank]
    if not isinstance(loader, PositionedLoader) or own["position"] is None:
        set_generators(own["generators"])
        return None
    loader.begin_at(DataPosition(**{**own["position"], "loaders": tuple(own["position"]["loaders"])}))
    loader.restore(own["generators"])
    iter(trainer.fit_loop._data_fetcher)  # fetches ahead again, from the position, where it does at all
    return None


def _continue_on_other_ranks(trainer: Any, loader: PositionedLoader, ranks: list[dict[str, Any]]) -> None:
    """Continue after the share of the epoch that another number of ranks has used."""
    num_saved = (ranks[0]["position"] or {"num_batches": 0})["num_batches"]
    num_batches = num_saved * len(ranks) // trainer.world_size
    num_batches -= num_batches % trainer.accumulate_grad_batches  # a step begins with its first batch
    if num_saved:
        loader.begin_at(DataPosition(num_batches))
        iter(trainer.fit_loop._data_fetcher)
    else:  # saved at the end of an epoch
        num_batches = trainer.num_training_batches
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = num_batches


def _restore_batches(loader: PositionedLoader, first: dict[str, Any]) -> None:
    """Continue at the positions that any rank has saved, on any number of ranks."""
    loader.load_batches(first.get("batches", []))
    position = first["position"] or {"num_batches": 0}
    loader.begin_at(DataPosition(position["num_batches"]))


@dataclass(frozen=True, slots=True)
class _PositionedSource:
    """Source of the training data that returns it in a `PositionedLoader`; part of a pickled trainer."""

    source: Any

    def __call__(self) -> PositionedLoader:
        """Return the training data, as `dataloader` of Lightning's source does."""
        return PositionedLoader.around(type(self.source).dataloader(self.source))


def check_batches(trainer: Any) -> None:
    """Check that GlobalBatches in the training data fit the trainer.

    Raises:
        InvalidInput: they are made for other ranks or another number of batches per step.
        Unsupported: the loaders are made again while training runs.
    """
    loader = trainer.fit_loop._combined_loader
    batches = loader.batches if isinstance(loader, PositionedLoader) else []
    theirs = trainer.global_rank, trainer.world_size
    if batches and trainer.reload_dataloaders_every_n_epochs:
        raise Unsupported(
            "reload_dataloaders_every_n_epochs makes GlobalBatches anew, without their position. Nothing was "
            "trained. Leave it out: they have another order in each epoch."
        )
    for one in batches:
        if (one.rank, one.world_size) != theirs:
            raise InvalidInput(
                f"GlobalBatches are for rank {one.rank} of {one.world_size}, and this is rank {theirs[0]} of "
                f"{theirs[1]}. Nothing was trained. Make them in train_dataloader(), which Lightning calls "
                "once the ranks have started."
            )
        if one.accumulation_steps != trainer.accumulate_grad_batches:
            raise InvalidInput(
                f"GlobalBatches have accumulation_steps={one.accumulation_steps}, and the Trainer has "
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}. Training was stopped. Set the "
                "same number."
            )


def watch_position(trainer: Any) -> None:
    """Have Lightning read the training data through a `PositionedLoader`.

    Loaders with GlobalBatches keep them: these divide the data among the ranks themselves.
    """
    source = trainer.fit_loop._data_source
    source.dataloader = _PositionedSource(source)
    connector = trainer._data_connector
    connector._requires_distributed_sampler = _SamplerRule(connector)


@dataclass(frozen=True, slots=True)
class _SamplerRule:
    """Decision whether Lightning divides the data of a loader; part of a pickled trainer."""

    connector: Any

    def __call__(self, dataloader: Any) -> bool:
        """Return True if the loader needs a distributed sampler, as Lightning's connector decides."""
        if isinstance(getattr(dataloader, "batch_sampler", None), Batches):
            return False
        return bool(type(self.connector)._requires_distributed_sampler(self.connector, dataloader))
