"""Shuffled batches of any number of samples, whose order is computed instead of stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from typing_extensions import override

from holdfast.errors import InvalidInput
from holdfast.system.units import plural
from holdfast.train.data.batches import Batches
from holdfast.train.data.permutation import KeyedPermutation

_BLOCK = 8192
"""Places whose samples are computed together, since a single one takes almost as long."""


@final
class GlobalBatches(Batches[int]):
    """Global batches of shuffled samples. Yields lists of the indices of this rank.

    `DataLoader(data, batch_sampler=GlobalBatches(len(data), 64))` replaces `DataLoader(data, 64,
    shuffle=True)`. The order is a function of seed, epoch and place, so the state is one number and the
    skipped ranges, and the memory does not depend on the number of samples.

    Args:
        num_samples: number of samples of the data.
        batch_size: samples of all ranks in one optimizer step.
        shuffle: another random order in each epoch; otherwise the order of the data.
        **options: as for `Batches`: `seed`, `accumulation_steps`, `drop_last`, `rank`, `world_size`.

    Raises:
        InvalidInput: an argument is out of range, or there are fewer samples than ranks.
    """

    def __init__(self, num_samples: int, batch_size: int, *, shuffle: bool = True, **options: Any) -> None:
        super().__init__(batch_size, **options)
        if num_samples < (batch_size if self.drop_last else self._num_shares):
            raise InvalidInput(
                f"{plural(num_samples, 'sample')} do not fill one batch of {batch_size} for "
                f"{plural(self.world_size, 'rank')} (accumulation_steps={self.accumulation_steps}, "
                f"drop_last={self.drop_last}).",
                rank=self.rank,
            )
        self.num_samples, self.shuffle = num_samples, shuffle
        self._blocks: dict[tuple[int, int], list[int]] = {}  # of the order, by epoch and number; two

    @override
    def _count_units(self, epoch: int) -> int:
        return self.num_samples

    @override
    def _identity(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self.shuffle}

    @override
    def _units(self, epoch: int, offsets: Sequence[int]) -> list[int]:
        if not self.shuffle:
            return list(offsets)
        return [self._block(epoch, place // _BLOCK)[place % _BLOCK] for place in offsets]

    def _block(self, epoch: int, number: int) -> list[int]:
        if (epoch, number) not in self._blocks:
            while len(self._blocks) > 1:
                del self._blocks[next(iter(self._blocks))]
            permute = KeyedPermutation(self.num_samples, f"{self.seed}/{epoch}".encode())
            places = torch.arange(number * _BLOCK, min((number + 1) * _BLOCK, self.num_samples))
            self._blocks[epoch, number] = permute(places).tolist()
        return self._blocks[epoch, number]
