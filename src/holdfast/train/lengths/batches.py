"""Batches in an order that all ranks know, that gives each unit once an epoch and resumes anywhere."""

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
    """Gives this rank its share of each global batch, epoch after epoch; a `batch_sampler=` of a DataLoader.

    A batch is drawn for all ranks together and divided among them, so its contents do not depend on how many
    they are: put this object into the state of a Checkpointer, and a run goes on with the next batch on any
    number of ranks. Each unit comes once in an epoch, on one rank. Every rank gets equally many batches.

    At the end of an epoch the last two batches share what is left, so none is larger than `batch_size` or
    less than half of it, unless that is fewer units than ranks: then they are one batch. After a resume in
    mid-epoch on more ranks, a rest of fewer units than ranks is left out.

    With a DataLoader that has worker processes, which take batches ahead of training, save the state of a
    loader that counts what it has given (torchdata's StatefulDataLoader) instead of this object.

    Args:
        batch_size: units of all ranks in one optimizer step.
        seed: of the order; the same seed gives the same order.
        accumulate: parts into which each rank's share is divided, for gradient accumulation: iteration then
            gives that many batches for each step.
        drop_last: leave out what is left at the end of an epoch, so that all batches are alike in size.
        rank: this rank's number; by default that in torch.distributed, or 0.
        world_size: how many ranks there are; by default as many as in torch.distributed, or 1.

    Raises:
        InvalidInput: an argument is out of range, or a batch has fewer units than there are ranks.

    Ranks: not collective; every rank makes it with the same arguments, apart from `rank`.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        accumulate: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        has_ranks = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if has_ranks else 0
        self.world_size = world_size or (dist.get_world_size() if has_ranks else 1)
        self.batch_size, self.accumulate, self.drop_last, self.seed = batch_size, accumulate, drop_last, seed
        if not 0 <= self.rank < self.world_size or accumulate < 1 or batch_size < self._num_shares:
            raise InvalidInput(
                f"A batch of {batch_size} for rank {self.rank} of {self.world_size}, in {accumulate} parts, "
                "cannot be divided: it needs at least one unit for each part of each rank.",
                rank=self.rank,
            )
        self.epoch = 0
        """The epoch that the next batch is of."""
        self._taken = 0  # units of this epoch that all ranks together have had
        self._planned: tuple[int, list[Unit]] | None = None

    @property
    def _num_shares(self) -> int:
        return self.world_size * self.accumulate

    @abstractmethod
    def _arrange(self, generator: torch.Generator) -> list[Unit]:
        """All units of an epoch, in the order in which they are cut into batches."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What the order depends on, besides the seed; a resume with another is refused."""

    def __iter__(self) -> Iterator[list[Unit]]:
        """This rank's batches from where it stands to the end of the epoch; the next call begins another."""
        return _Epoch(self)

    def __len__(self) -> int:
        """Batches that a whole epoch gives this rank."""
        return len(self._cuts(0)) * self.accumulate

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: epoch, units taken, and what the order depends on."""
        return {"epoch": self.epoch, "taken": self._taken, "order": self._order_identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks.

        Raises:
            InvalidInput: the order depends on something else than it did: other data, batch size or seed.
        """
        mine = self._order_identity()
        if differing := [name for name in mine if state["order"].get(name) != mine[name]]:
            told = ", ".join(
                f"{name} {state['order'].get(name)} then, {mine[name]} now" for name in differing
            )
            raise InvalidInput(
                f"The order of batches cannot be resumed: {told}. The rest of the epoch would not be "
                "the rest of what it was. Use the same data and settings, or leave this object out of "
                "the state.",
                rank=self.rank,
            )
        self.epoch, self._taken = state["epoch"], state["taken"]

    def _order_identity(self) -> dict[str, Any]:
        common = {"batch_size": self.batch_size, "seed": self.seed, "drop_last": self.drop_last}
        return {**common, **self._identity()}

    def _units(self) -> list[Unit]:
        """The units of the present epoch; planning it takes a sort of all lengths, so it is kept."""
        if self._planned is None or self._planned[0] != self.epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            self._planned = (self.epoch, self._arrange(generator))
        return self._planned[1]

    def _cuts(self, taken: int) -> list[tuple[int, int]]:
        """Where the batches of the present epoch begin and end, from `taken` units on."""
        return cut_epoch(
            len(self._units()),
            self.batch_size,
            least=self._num_shares,
            drop_last=self.drop_last,
            taken=taken,
        )

    def _advance(self, taken: int, *, is_last: bool) -> None:
        self.epoch, self._taken = (self.epoch + 1, 0) if is_last else (self.epoch, taken)


class _Epoch(Generic[Unit]):
    """The rest of one epoch. Has a state of its own for loaders that ask their iterator for it."""

    def __init__(self, batches: Batches[Unit]) -> None:
        self._batches = batches
        self._begin()

    def _begin(self) -> None:
        batches = self._batches
        self._cuts = batches._cuts(batches._taken)
        if not self._cuts:  # what is left of the epoch is less than a batch
            batches._advance(0, is_last=True)
            self._cuts = batches._cuts(0)
        self._units = batches._units()
        self._given = 0  # parts of batches, of this rank

    def __iter__(self) -> _Epoch[Unit]:
        return self

    def __next__(self) -> list[Unit]:
        batches = self._batches
        number, part = divmod(self._given, batches.accumulate)
        if number == len(self._cuts):
            raise StopIteration
        start, end = self._cuts[number]
        self._given += 1
        if part + 1 == batches.accumulate:
            batches._advance(end, is_last=number + 1 == len(self._cuts))
        return self._units[start + part * batches.world_size + batches.rank : end : batches._num_shares]

    def state_dict(self) -> dict[str, Any]:
        """The state of the batches that this is an epoch of."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._batches.load_state_dict(state)
        self._begin()


def cut_epoch(
    num_units: int, batch_size: int, *, least: int, drop_last: bool, taken: int = 0
) -> list[tuple[int, int]]:
    """Start and end of each batch of an epoch, from `taken` units on; pure.

    Args:
        num_units: units in the epoch.
        batch_size: units in a batch.
        least: units that a batch must have.
        drop_last: leave out what does not fill a batch.
        taken: units that earlier batches had, a multiple of `batch_size` or the end of one of the last two.
    """
    num_full, left = divmod(num_units, batch_size)
    ends = [batch_size * (number + 1) for number in range(num_full)]
    if left and not drop_last:
        tail = num_units - (ends[-2] if num_full > 1 else 0)
        if num_full and tail // 2 >= least:
            ends[-1:] = [num_units - tail // 2, num_units]
        else:
            ends[-1:] = [num_units]
    cuts = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if start >= taken]
    if not cuts and taken < num_units and not drop_last:
        cuts = [(taken, num_units)]  # cut for other ranks: what they left is one batch
    return [cut for cut in cuts if cut[1] - cut[0] >= least]


def fingerprint(lengths: Sequence[int]) -> str:
    """A short mark of these lengths, so that other data are noticed."""
    data = torch.as_tensor(lengths, dtype=torch.int64)
    return f"{len(lengths)} of {int(data.sum())} tokens, {zlib.crc32(view_bytes(data.contiguous())):08x}"
