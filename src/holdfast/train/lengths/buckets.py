"""Batches of sequences of similar length, in a nearly random order that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import torch

from holdfast.errors import InvalidInput
from holdfast.system.units import plural
from holdfast.train.data.batches import Batches, fingerprint

Unit = TypeVar("Unit")


class ArrangedEpochs(Generic[Unit]):
    """Units of epochs in order. The newest two are kept, since arranging them sorts all lengths.

    Args:
        seed: random seed of the order.
        arrange: returns all units of an epoch, in an order that a generator decides.
    """

    def __init__(self, seed: int, arrange: Callable[[torch.Generator], list[Unit]]) -> None:
        self._seed, self._arrange = seed, arrange
        self._kept: dict[int, list[Unit]] = {}

    def units(self, epoch: int) -> list[Unit]:
        """Return the units of an epoch, in order."""
        if epoch not in self._kept:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            while len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[epoch] = self._arrange(generator)
        return self._kept[epoch]


@final
class BucketBatches(Batches[int]):
    """Global batches of samples of similar length. Yields lists of the indices of this rank.

    All samples are shuffled, sorted by length within pools of several batches, and divided into batches,
    which are shuffled again. Pad each batch to a multiple of 64 or so to get few distinct shapes.

    Args:
        lengths: tokens of each sample.
        batch_size: samples of all ranks in one optimizer step.
        pool: number of batches whose samples are sorted together. 0 only shuffles.
        **options: as for `Batches`: `seed`, `accumulation_steps`, `drop_last`, `rank`, `world_size`.

    Raises:
        InvalidInput: an argument is out of range, or there are fewer samples than ranks.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, pool: int = 20, **options: Any) -> None:
        super().__init__(batch_size, **options)
        if len(lengths) < (batch_size if self.drop_last else self._num_shares) or pool < 0:
            raise InvalidInput(
                f"{plural(len(lengths), 'sample')} do not fill one batch of {batch_size} for "
                f"{plural(self.world_size, 'rank')} (accumulation_steps={self.accumulation_steps}, "
                f"drop_last={self.drop_last}, pool={pool}).",
                rank=self.rank,
            )
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self._pool = pool
        self._mark = fingerprint(lengths)
        self._epochs = ArrangedEpochs(self.seed, self._arrange)

    def _count_units(self, epoch: int) -> int:
        return len(self._lengths)

    def _units(self, epoch: int, offsets: Sequence[int]) -> list[int]:
        arranged = self._epochs.units(epoch)
        return [arranged[offset] for offset in offsets]

    def _identity(self) -> dict[str, Any]:
        return {"lengths": self._mark, "pool": self._pool}

    def _arrange(self, generator: torch.Generator) -> list[int]:
        """Return all samples of an epoch, in order."""
        order = torch.randperm(len(self._lengths), generator=generator)
        if self._pool == 0:
            return order.tolist()
        pools = order.split(self._pool * self.batch_size)
        order = torch.cat([pool[self._lengths[pool].argsort(stable=True)] for pool in pools])
        num_full = len(order) // self.batch_size  # the short batch stays last
        full = order[: num_full * self.batch_size].view(num_full, self.batch_size)
        full = full[torch.randperm(num_full, generator=generator)]
        return torch.cat([full.flatten(), order[full.numel() :]]).tolist()
