"""Position in the training data, and the resume point of all ranks: an entry of Lightning's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import asdict
from torch.utils._pytree import tree_map
from typing_extensions import Self

from holdfast.adapters.kit import data as kit_data
from holdfast.adapters.kit.data import DividedBatches
from holdfast.adapters.lightning.packages import EPOCH_CALLBACKS, CombinedLoader, DataLoaderIterDataFetcher
from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.log import get_logger

_log = get_logger("lightning")


class DataPosition(Struct, frozen=True):
    """Position of one rank in a pass over its training data."""

    num_batches: int  # that training has used
    at_start: dict[str, Any] | None = None  # generators when the pass began; None if that is the next batch
    before_fetched: dict[str, Any] | None = None  # generators before the fetch of an unused batch
    loaders: list[dict[str, Any]] = []  # their states, if each has one


class PositionedLoader(CombinedLoader):
    """CombinedLoader that records its position, and can begin at a recorded one.

    Loaders that have `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, restore their
    position themselves. So do batch samplers that count completed steps, such as GlobalBatches. The batches
    of others are read again, with the generators of that time, and discarded.
    """

    def __init__(self, loaders: Any, mode: Any) -> None:
        super().__init__(loaders, mode)
        self._at_start: dict[str, Any] | None = None
        self._before: tuple[dict[str, Any], list[dict[str, Any]]] | None = None  # the last fetch
        self._num_fetched = 0
        self._num_reached = 0  # batches that training has used
        self._begin_at: DataPosition | None = None
        self._fetched: list[Any] = []
        self.on_error: Callable[[Exception], object] = lambda _: None
        """Called with an error of the loaders, before it is raised."""

    @classmethod
    def around(cls, loader: Any) -> PositionedLoader:
        """Return a loader that records its position, combined like Lightning's own."""
        if isinstance(loader, PositionedLoader):
            return loader
        if isinstance(loader, CombinedLoader):
            return cls(loader.iterables, loader._mode)
        return cls(loader, "max_size_cycle")

    # -- batches that count steps ----------------------------------------------------------------------------
    @property
    def batches(self) -> list[DividedBatches]:
        """Batch samplers that count completed steps, each once."""
        samplers = [getattr(loader, "batch_sampler", None) for loader in self.flattened]
        return list({id(one): one for one in samplers if isinstance(one, DividedBatches)}.values())

    def reach(self, num_batches: int) -> None:
        """Record that training has used the first batches of this pass."""
        num_batches = max(self._num_reached, min(num_batches, self._num_fetched))
        for batches in self.batches:
            num_before = self._num_reached // batches.accumulation_steps
            batches.complete_steps(num_batches // batches.accumulation_steps - num_before)
        self._num_reached = num_batches

    def load_batches(self, states: list[dict[str, Any]]) -> None:
        """Continue at the positions of a checkpoint."""
        if len(states) != len(self.batches):
            raise InvalidInput(
                f"The checkpoint has the positions of {len(states)} GlobalBatches, and the training data has "
                f"{len(self.batches)}. Nothing was trained. Resume with the loaders that the run "
                f"was saved with."
            )
        for batches, state in zip(self.batches, states, strict=True):
            batches.load_state_dict(state)

    # -- record ----------------------------------------------------------------------------------------------
    def capture(self) -> dict[str, Any]:
        """Return the states of the generators of the process and of the loaders."""
        return {**capture_generators(), "loaders": [one.get_state() for one in self._generators()]}

    def restore(self, states: dict[str, Any]) -> None:
        """Set the generators of the process and of the loaders."""
        set_generators(states)
        for generator, state in zip(self._generators(), states["loaders"], strict=False):
            generator.set_state(state.cpu())

    def position(self, num_batches: int) -> DataPosition:
        """Return the position after a number of batches of this pass."""
        if self._before is not None and self._num_fetched > num_batches:
            return DataPosition(num_batches, self._at_start, *self._before)
        return DataPosition(num_batches, self._at_start, None, self._loader_states())

    def _loader_states(self) -> list[dict[str, Any]]:
        """Return the states of the loaders; none unless each has one."""
        states = [] if self.batches else self._state_dicts()
        return states if len(states) == len(self.flattened) else []

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that the loaders own, each once."""
        every = (one for loader in self.flattened for one in kit_data.generators_of(loader))
        return list({id(one): one for one in every}.values())

    # -- reach -----------------------------------------------------------------------------------------------
    def begin_at(self, position: DataPosition) -> None:
        """Continue at a position with the next batch. The states of the generators do not change."""
        self._begin_at = position

    def __iter__(self) -> Self:
        if self._begin_at is not None and self._iterator is not None:
            return self  # the pass begins with the next batch, after all hooks that draw random numbers
        self._at_start, self._before = self.capture(), None
        self._num_fetched, self._num_reached, self._fetched = 0, 0, []
        if self.batches:
            samplers = [getattr(one, "batch_sampler", None) for one in self.flattened]
            if not all(isinstance(one, DividedBatches) for one in samplers):
                raise Unsupported(
                    "Some loaders of the training data have GlobalBatches, and others do not, so their "
                    "positions cannot be restored together. Nothing was trained. Give each of them "
                    "GlobalBatches, or none."
                )
            for batches in self.batches:
                batches.complete_steps(0)
        super().__iter__()
        return self

    def __next__(self) -> Any:
        if self._begin_at is not None:
            self._begin(self._begin_at)
        return self._fetched.pop() if self._fetched else self._fetch()

    def _fetch(self) -> Any:
        before = self._before
        if not self.has_length:
            self._before = self.capture(), self._loader_states()
        try:
            batch = super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            self._before = before  # of the batch that was fetched ahead
            self.on_error(error)
            raise
        self._num_fetched += 1
        return batch

    @property
    def has_length(self) -> bool:
        """True if the number of batches is fixed. Lightning does not fetch ahead then."""
        try:
            return len(self) != float("inf")
        except (TypeError, NotImplementedError):
            return False

    def _begin(self, position: DataPosition) -> None:
        """Begin a pass, and skip to the position."""
        self._begin_at = None
        if position.at_start is None:
            iter(self)
            self._pass_over(position)
            return
        now = self.capture()
        self.restore(position.at_start)
        if position.loaders:
            self._load_state_dicts(position.loaders)
        iter(self)
        self._at_start = position.at_start
        self._pass_over(position)
        if position.before_fetched is not None:
            self.restore(position.before_fetched)
            self._fetched = [self._fetch()]
        self.restore(now)

    def _pass_over(self, position: DataPosition) -> None:
        """Count the batches before a position as used, and reread those not skipped."""
        self._num_fetched = self._num_reached = position.num_batches
        if self.batches:  # they are at the last complete step; gradients of a part of one are not saved
            self._read_again(position.num_batches % self.batches[0].accumulation_steps)
        elif not position.loaders:
            self._read_again(position.num_batches)

    def _read_again(self, num_batches: int) -> None:
        if num_batches:
            _log.info(
                "reading %d batches again to reach the position in the data; torchdata's StatefulDataLoader "
                "is there at once",
                num_batches,
            )
        for _ in range(num_batches):
            super().__next__()


def capture_generators() -> dict[str, Any]:
    """Return the generators of this process, as values that torch.load accepts with `weights_only`."""
    return tree_map(_as_tensor, kit_data.capture_process())


def set_generators(states: dict[str, Any]) -> None:
    """Set the generators to states from `capture_generators`."""
    kit_data.set_process(tree_map(_as_plain, states))


def _as_tensor(value: Any) -> Any:
    if isinstance(value, bytes):
        return kit_data.tensor_of(value)
    return torch.from_numpy(value.astype("int64")) if hasattr(value, "astype") else value  # of numpy


def _as_plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return kit_data.bytes_of(value) if value.dtype == torch.uint8 else value.cpu().numpy().astype("uint32")


KEY = "holdfast"
"""Key of the entry in the checkpoint."""


def capture_point(trainer: Any) -> dict[str, Any]:
    """Return the resume point of all ranks, to be saved by rank 0."""
    loader = trainer.fit_loop._combined_loader
    own: dict[str, Any] = {"generators": capture_generators(), "position": None}
    if isinstance(loader, PositionedLoader):
        reach_batch(trainer)
        epoch_loop = trainer.fit_loop.epoch_loop
        is_at_end = epoch_loop.batch_progress.is_last_batch or epoch_loop._num_ready_batches_reached()
        position = DataPosition(0) if is_at_end else loader.position(num_used(trainer))
        own = {"generators": loader.capture(), "position": asdict(position)}
        own["batches"] = [one.state_dict() for one in loader.batches]
    ranks: list[Any] = [own]
    if dist.is_available() and dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, own)
    return {"ranks": ranks}


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


def complete_batch(checkpoint: dict[str, Any]) -> bool:
    """Mark a checkpoint's batch as complete if it was saved at its end.

    Lightning resumes such a checkpoint with the next batch. If validation or the end of the epoch is next,
    it skips them, so that random numbers and schedules differ from an uninterrupted run. If True is returned,
    `finish_batch` has to be called when training begins.
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
    loop.advance = partial(_pass_over_batch, loop)


def _pass_over_batch(loop: Any, data_fetcher: Any) -> None:
    """Do nothing in the first iteration of a resumed loop: its batch was trained before."""
    del loop.advance
    loop.val_loop.restarting = False


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
    """Restore this rank's generators and position; return why training differs from an unbroken one."""
    loader = trainer.fit_loop._combined_loader
    if isinstance(loader, PositionedLoader) and loader.batches:
        first = point["ranks"][0]  # the same on all ranks, of any number
        loader.load_batches(first.get("batches", []))
        loader.begin_at(DataPosition((first["position"] or {"num_batches": 0})["num_batches"]))
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
    loader.begin_at(DataPosition(**own["position"]))
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


def check_batches(trainer: Any) -> None:
    """Check that GlobalBatches in the training data fit the trainer."""
    loader = trainer.fit_loop._combined_loader
    every = loader.batches if isinstance(loader, PositionedLoader) else []
    theirs = trainer.global_rank, trainer.world_size
    if every and trainer.reload_dataloaders_every_n_epochs:
        raise Unsupported(
            "reload_dataloaders_every_n_epochs makes GlobalBatches anew, without their position. Nothing was "
            "trained. Leave it out: they have another order in each epoch."
        )
    for batches in every:
        if (batches.rank, batches.world_size) != theirs:
            raise InvalidInput(
                f"GlobalBatches are for rank {batches.rank} of {batches.world_size}, and this is rank "
                f"{theirs[0]} of {theirs[1]}. Nothing was trained. Make them in train_dataloader(), which "
                "Lightning calls once the ranks have started."
            )
        if batches.accumulation_steps != trainer.accumulate_grad_batches:
            raise InvalidInput(
                f"GlobalBatches have accumulation_steps={batches.accumulation_steps}, and the Trainer has "
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}. Training was stopped. Set the "
                "same number."
            )


def watch_position(trainer: Any) -> None:
    """Have Lightning read the training data through a `PositionedLoader`.

    Loaders with GlobalBatches keep them: these divide the data among the ranks themselves.
    """
    source, connector = trainer.fit_loop._data_source, trainer._data_connector
    # Functions and no lambdas, since they are part of a pickled trainer.
    source.dataloader = partial(_positioned, source)
    connector._requires_distributed_sampler = partial(_is_to_divide, connector)


def _positioned(source: Any) -> PositionedLoader:
    """Return the training data, as `dataloader` of Lightning's source does."""
    return PositionedLoader.around(type(source).dataloader(source))


def _is_to_divide(connector: Any, dataloader: Any) -> bool:
    """Return True if a loader needs a distributed sampler, as Lightning's connector decides."""
    if isinstance(getattr(dataloader, "batch_sampler", None), DividedBatches):
        return False
    return bool(type(connector)._requires_distributed_sampler(connector, dataloader))
