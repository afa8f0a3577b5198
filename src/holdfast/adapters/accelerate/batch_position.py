"""Position of a loader with GlobalBatches, which any number of ranks can continue at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from typing_extensions import override

from holdfast.adapters.accelerate.data_position import AT_END, DataPosition
from holdfast.errors import InvalidInput, Unsupported
from holdfast.train.data import Batches

if TYPE_CHECKING:
    from accelerate import Accelerator


class BatchPosition(DataPosition):
    """Position of one loader with GlobalBatches. It is the same on all ranks.

    A batch counts as used once the next one is requested, or the state is saved.

    Args:
        loader: loader of the Accelerator.
        batches: its batch sampler.
    """

    def __init__(self, loader: Any, batches: Batches[Any]) -> None:
        super().__init__(loader)
        self._batches = batches
        self._num_before = 0  # batches of the epoch that earlier passes have used
        self._num_given = 0  # batches of the epoch that were given, while a pass is under way
        self._num_steps = 0  # optimizer steps of this pass that were counted

    @property
    def num_used(self) -> int:
        """Number of this rank's batches of the epoch that training has used."""
        return self._num_before if self._active is None else self._num_given

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._active is not None:
            self._reach(self._num_given)
        return {**super().state_dict(), "num_used": self.num_used, "batches": self._batches.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "batches" not in state:
            raise InvalidInput(
                "The checkpoint has no position of GlobalBatches: it was saved with another kind of loader. "
                "Training has not begun. Prepare the loader that the run was saved with."
            )
        self._batches.load_state_dict(state["batches"])
        self._num_before = 0 if state["phase"] == AT_END else state["num_used"]
        super().load_state_dict(state)

    @override
    def _load_elsewhere(self, state: dict[str, Any]) -> None:
        if state["phase"] == AT_END:
            self._loader.iteration += 1

    @property
    @override
    def _continues_itself(self) -> bool:
        return True

    @override
    def begin(self, loader: Any) -> dict[str, Any] | None:
        self._batches.complete_steps(0)
        self._num_given, self._num_steps = self._num_before, 0
        return super().begin(loader)

    @override
    def give(self, number: int) -> bool:
        # The batches continue at a whole step. Gradients of a part of one are not saved, but it was used.
        in_step = self._num_before % self._batches.accumulation_steps
        if number <= in_step:
            return False
        self._reach(self._num_given)
        self._num_given = self._num_before - in_step + number
        return True

    def _reach(self, num_batches: int) -> None:
        """Count the steps of the epoch's first batches."""
        parts = self._batches.accumulation_steps
        num_steps = num_batches // parts - self._num_before // parts
        self._batches.complete_steps(num_steps - self._num_steps)
        self._num_steps = num_steps

    @override
    def leave(self) -> None:
        self._reach(self._num_given)
        self._num_before = self._num_given
        super().leave()

    @override
    def end(self, loader: Any, *, is_empty: bool) -> None:
        self._reach(self._num_given)
        self._num_before = 0
        super().end(loader, is_empty=is_empty)

    def check_skip(self, num_batches: int) -> bool:
        """Return True if the epoch continues after a number of batches; False if that is its end.

        Raises:
            InvalidInput: the position is another one.
        """
        if num_batches == len(self._batches) and self.num_used == 0:
            return False
        if num_batches not in (0, self.num_used):
            raise InvalidInput(
                f"skip_first_batches was to skip {num_batches} batches of a loader with GlobalBatches that "
                f"has used {self.num_used} of its epoch. Nothing was skipped. Iterate over the loader "
                "itself: it continues at its position. batches.skip() leaves samples out."
            )
        return True


def batches_of(loader: Any) -> Batches[Any] | None:
    """Return the GlobalBatches that a loader reads, or None."""
    found = getattr(loader, "batch_sampler", None)
    return found if isinstance(found, Batches) else None


def prepare_batches(accelerator: Accelerator, loader: DataLoader[Any], *, on_device: bool | None) -> Any:
    """Prepare a loader with GlobalBatches, which divide the data among the ranks themselves.

    Args:
        accelerator: the Accelerator.
        loader: loader of the user.
        on_device: move the batches to the device; None as the Accelerator is configured.

    Raises:
        InvalidInput: they are made for other ranks, or for another number of batches per step.
        Unsupported: some ranks need the same samples.
    """
    own: Any = accelerator
    batches = batches_of(loader)
    assert batches is not None
    _check_ranks(own, batches)
    prepared = prepare_data_loader(
        loader,
        own.device,
        num_processes=1,
        process_index=0,
        put_on_device=own.device_placement if on_device is None else on_device,
        rng_types=own.rng_types.copy(),
        dispatch_batches=False,
        non_blocking=own.non_blocking,
    )
    prepared._drop_last = True  # else gather_for_metrics cuts the last batch as if the others were whole
    own._dataloaders.append(prepared)
    return prepared


def check_prepared(loader: Any) -> None:
    """Check that a loader that was prepared before `attach` has not divided GlobalBatches once more.

    Raises:
        InvalidInput: it has.
    """
    outer = getattr(loader, "batch_sampler", None)
    if isinstance(getattr(outer, "batch_sampler", None), Batches):
        raise InvalidInput(
            "A loader with GlobalBatches was prepared before attach(), so each rank would get a part of its "
            "share. The Accelerator was not changed. Call attach() before prepare()."
        )


def _check_ranks(own: Any, batches: Batches[Any]) -> None:
    parallelism = getattr(own, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise Unsupported(
            "GlobalBatches divide each batch among all ranks, but with tensor, context or sequence "
            "parallelism some need the same samples. The loader was not prepared. Use shuffle=True."
        )
    mine, theirs = (batches.rank, batches.world_size), (own.process_index, own.num_processes)
    if mine != theirs:
        raise InvalidInput(
            f"GlobalBatches are for rank {mine[0]} of {mine[1]}, and this is rank {theirs[0]} of "
            f"{theirs[1]}. The loader was not prepared. Make them after the Accelerator, which starts the "
            "process group."
        )
    if own.gradient_accumulation_steps not in (1, batches.accumulation_steps):
        raise InvalidInput(
            f"GlobalBatches have accumulation_steps={batches.accumulation_steps}, and the Accelerator has "
            f"gradient_accumulation_steps={own.gradient_accumulation_steps}. The loader was not prepared. "
            "Set the same number."
        )
