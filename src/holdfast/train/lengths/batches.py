"""Batches in an order shared by all ranks: each unit once per epoch, resumable at any batch."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from holdfast.errors import InvalidInput
from holdfast.rawbytes import view_bytes

Unit = TypeVar("Unit")


class Batches(ABC, Generic[Unit]):
    """This rank's share of each global batch, epoch after epoch: a `batch_sampler=` for a DataLoader.

    A batch is drawn for all ranks together and divided among them, so its contents do not depend on their
    number. Put this object into the state of a Checkpointer, and a resumed run continues with the next batch
    on any number of ranks. Each unit occurs once per epoch, on one rank. All ranks get the same number of
    batches.

    The last two batches of an epoch share the remaining units, so neither is larger than `batch_size` or
    smaller than half of it. If that is fewer units than ranks, they become one batch. After a resume in
    mid-epoch on more ranks, a remainder of fewer units than ranks is dropped.

    A DataLoader with worker processes reads batches ahead of training. With such a loader, save the state of
    a loader that counts the batches it returned (torchdata's StatefulDataLoader) instead of this object.

    Args:
        batch_size: units of all ranks in one optimizer step.
        seed: random seed of the order.
        accumulation_steps: number of batches that each rank's share is divided into, for gradient
            accumulation. Iteration yields that many batches per optimizer step.
        drop_last: drop the remaining units at the end of an epoch, so that all batches have the same size.
        rank: this rank's number. Default: the rank in torch.distributed, or 0.
        world_size: number of ranks. Default: the world size in torch.distributed, or 1.

    Raises:
        InvalidInput: an argument is out of range, or a batch has fewer units than there are ranks.

    Ranks: not collective; every rank makes it with the same arguments, apart from `rank`.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        accumulation_steps: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        has_ranks = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if has_ranks else 0
        self.world_size = world_size or (dist.get_world_size() if has_ranks else 1)
        self.batch_size, self.accumulation_steps = batch_size, accumulation_steps
        self.drop_last, self.seed = drop_last, seed
        if not 0 <= self.rank < self.world_size or accumulation_steps < 1 or batch_size < self._num_shares:
            raise InvalidInput(
                f"A batch of {batch_size} cannot be divided for rank {self.rank} of {self.world_size} with "
                f"{accumulation_steps=}: it needs at least one unit per rank and accumulation step.",
                rank=self.rank,
            )
        self.epoch = 0
        """Epoch of the next batch."""
        self._taken = 0  # units of this epoch that were given to all ranks together
        self._planned: tuple[int, list[Unit]] | None = None

    @property
    def _num_shares(self) -> int:
        return self.world_size * self.accumulation_steps

    @abstractmethod
    def _arrange(self, generator: torch.Generator) -> list[Unit]:
        """Return all units of an epoch, in order."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return the facts that the order depends on, besides the seed. A resume compares them."""

    def __iter__(self) -> Iterator[list[Unit]]:
        """Return this rank's remaining batches of the epoch. The next call starts another epoch."""
        return _Epoch(self)

    def __len__(self) -> int:
        """Return the number of batches of a complete epoch on this rank."""
        return len(self._bounds(0)) * self.accumulation_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, units taken, and the facts that the order depends on."""
        return {"epoch": self.epoch, "taken": self._taken, "order": self._order_identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`, on any number of ranks.

        Raises:
            InvalidInput: the data, batch size or seed differ from those of `state`.
        """
        mine = self._order_identity()
        if differing := [name for name in mine if state["order"].get(name) != mine[name]]:
            changes = ", ".join(
                f"{name} was {state['order'].get(name)}, is {mine[name]}" for name in differing
            )
            raise InvalidInput(
                f"The order of batches cannot be resumed: {changes}. The rest of the epoch would "
                "repeat or skip samples. Use the same data and settings, or remove this object from "
                "the state.",
                rank=self.rank,
            )
        self.epoch, self._taken = state["epoch"], state["taken"]

    def _order_identity(self) -> dict[str, Any]:
        common = {"batch_size": self.batch_size, "seed": self.seed, "drop_last": self.drop_last}
        return {**common, **self._identity()}

    def _units(self) -> list[Unit]:
        """Return the units of the current epoch, cached because arranging them sorts all lengths."""
        if self._planned is None or self._planned[0] != self.epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            self._planned = (self.epoch, self._arrange(generator))
        return self._planned[1]

    def _bounds(self, taken: int) -> list[tuple[int, int]]:
        """Return start and end of each batch of the current epoch, from `taken` units on."""
        return batch_bounds(
            len(self._units()),
            self.batch_size,
            min_units=self._num_shares,
            drop_last=self.drop_last,
            taken=taken,
        )

    def _advance(self, taken: int, *, is_last: bool) -> None:
        self.epoch, self._taken = (self.epoch + 1, 0) if is_last else (self.epoch, taken)


class _Epoch(Generic[Unit]):
    """The rest of one epoch. Has its own state for loaders that save their iterator."""

    def __init__(self, batches: Batches[Unit]) -> None:
        self._batches = batches
        self._begin()

    def _begin(self) -> None:
        batches = self._batches
        self._bounds = batches._bounds(batches._taken)
        if not self._bounds:  # less than a batch is left of the epoch
            batches._advance(0, is_last=True)
            self._bounds = batches._bounds(0)
        self._units = batches._units()
        self._num_given = 0  # batches that this rank returned

    def __iter__(self) -> _Epoch[Unit]:
        return self

    def __next__(self) -> list[Unit]:
        batches = self._batches
        number, part = divmod(self._num_given, batches.accumulation_steps)
        if number == len(self._bounds):
            raise StopIteration
        start, end = self._bounds[number]
        self._num_given += 1
        if part + 1 == batches.accumulation_steps:
            batches._advance(end, is_last=number + 1 == len(self._bounds))
        return self._units[start + part * batches.world_size + batches.rank : end : batches._num_shares]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the batches."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`."""
        self._batches.load_state_dict(state)
        self._begin()


def batch_bounds(
    num_units: int, batch_size: int, *, min_units: int, drop_last: bool, taken: int = 0
) -> list[tuple[int, int]]:
    """Return start and end of each batch of an epoch, from `taken` units on.

    Args:
        min_units: the fewest units of a batch.
        drop_last: drop units that do not fill a batch.
        taken: units in earlier batches: a multiple of `batch_size`, or the end of one of the last two.
    """
    num_full, left = divmod(num_units, batch_size)
    ends = [batch_size * (number + 1) for number in range(num_full)]
    if left and not drop_last:
        tail = num_units - (ends[-2] if num_full > 1 else 0)
        if num_full and tail // 2 >= min_units:
            ends[-1:] = [num_units - tail // 2, num_units]
        else:
            ends[-1:] = [num_units]
    bounds = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if start >= taken]
    if not bounds and taken < num_units and not drop_last:
        bounds = [(taken, num_units)]  # divided for another number of ranks: one batch is left
    return [(start, end) for start, end in bounds if end - start >= min_units]


def fingerprint(lengths: Sequence[int]) -> str:
    """Return a short digest of the lengths, to detect other data."""
    data = torch.as_tensor(lengths, dtype=torch.int64)
    return f"{len(lengths)} of {int(data.sum())} tokens, {zlib.crc32(view_bytes(data.contiguous())):08x}"
