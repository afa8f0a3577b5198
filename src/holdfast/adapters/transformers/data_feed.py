"""Feed of a Trainer with global batches, whose position is part of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

from holdfast.adapters.kit.batches import DividedBatches
from holdfast.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from transformers import Trainer

_LOADER_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class DataFeed:
    """Batch sampler of the Trainer's loader. Its state is that of the batches.

    After a resume, the Trainer skips the batches of the epoch that were used. The batches are at the next one
    already, so it gets empty ones to skip.

    Args:
        batches: batches of the user.
    """

    def __init__(self, batches: DividedBatches) -> None:
        self.batches = batches
        self.batch_size = batches.batch_size // batches.accumulation_steps
        self._step = 0  # steps that the batches have counted
        self._num_passed = 0  # batches that the Trainer is about to skip

    def __iter__(self) -> Iterator[list[Any]]:
        num_passed, self._num_passed = self._num_passed, 0
        for _ in range(num_passed):
            yield []
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)

    def begin(self, step: int) -> None:
        """Begin to train after a step, which the Trainer and the batches have reached."""
        self._step = step
        self._num_passed = step * self.batches.accumulation_steps % len(self.batches)
        self.batches.complete_steps(0)

    def reach(self, step: int) -> None:
        """Record that all steps up to this one are complete."""
        num_steps, self._step = step - self._step, step
        self.batches.complete_steps(num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the batches."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`."""
        self.batches.load_state_dict(state)

    def loader(self, trainer: Trainer, stock: Any) -> DataLoader[Any]:
        """Return a loader like the Trainer's own that reads this feed, undivided.

        Args:
            trainer: the Trainer.
            stock: its own loader, which is replaced.
        """
        options = {name: getattr(stock, name) for name in _LOADER_OPTIONS}
        accelerator = trainer.accelerator
        prepared = prepare_data_loader(
            DataLoader(stock.dataset, batch_sampler=self, **options),  # pyright: ignore[reportArgumentType]
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            rng_types=list(accelerator.rng_types or ()),
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
        )
        others = [one for one in accelerator._dataloaders if one is not stock]
        accelerator._dataloaders = [*others, prepared]
        return prepared


def check_data(trainer: Trainer, batches: Any) -> None:
    """Check that batches fit a Trainer."""
    if not isinstance(batches, DividedBatches):
        raise InvalidInput(
            f"attach(data=...) takes GlobalBatches or a relative, not {type(batches).__name__}. The Trainer "
            "was not changed. Pass data=GlobalBatches(len(trainer.train_dataset), 64)."
        )
    args, dataset = trainer.args, trainer.train_dataset
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise Unsupported(
            "attach(data=...) needs a train_dataset with a length, which is read by index. The Trainer was "
            "not changed. Leave data= out: a stream has an order of its own."
        )
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise Unsupported(
            "attach(data=...) divides each batch among all ranks, but with tensor, context or sequence "
            "parallelism some need the same samples. The Trainer was not changed. Leave data= out."
        )
    if faults := _faults(args, dataset, batches):
        raise InvalidInput(f"data= does not fit the Trainer: {faults[0]}. The Trainer was not changed.")


def _faults(args: Any, dataset: Any, batches: DividedBatches) -> list[str]:
    num_samples = getattr(batches, "num_samples", len(dataset))
    mine = batches.rank, batches.world_size
    theirs = args.process_index, args.world_size
    checks = [
        (
            mine == theirs,
            f"it is for rank {mine[0]} of {mine[1]}, and this is rank {theirs[0]} of {theirs[1]}. "
            "Make it after TrainingArguments, which start the process group",
        ),
        (
            num_samples == len(dataset),
            f"it is for {num_samples} samples, and train_dataset has {len(dataset)}. Pass len(train_dataset)",
        ),
        (
            batches.accumulation_steps == args.gradient_accumulation_steps,
            f"it has accumulation_steps={batches.accumulation_steps}, and TrainingArguments have "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}. Set the same number",
        ),
        (
            not args.ignore_data_skip,
            "ignore_data_skip=True begins the data anew after a resume. Leave it out: nothing is read again",
        ),
        (
            not args.auto_find_batch_size,
            "auto_find_batch_size=True changes the size of batches, which data= decides. Leave it out",
        ),
    ]
    return [text for is_right, text in checks if not is_right]
