"""Extra copies: tensors of other ranks that a save stages and hashes too, for a watch, by turns. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

_GOLDEN = (math.sqrt(5) - 1) / 2


class SharedTensor(Struct, frozen=True):
    """Region of a tensor on this rank that other ranks hold too.

    Attributes:
        name: name of the tensor in the checkpoint.
        number: number of the tensor in the catalog of the rank.
        region: number of the region, in the order of the tensor's partitioning.
        holders: for each copy of the tensor, the ranks that hold its regions. Tensors with the same holders
            share one object.
        num_bytes: bytes of a region, rounded up: the same on all holders.
        is_trained: only an optimizer's step changes it, so all copies must have the same bytes.
    """

    name: str
    number: int
    region: int
    holders: tuple[tuple[int, ...], ...]
    num_bytes: int
    is_trained: bool


class Copies(Struct, frozen=True):
    """Names of the tensors to copy and hash at each save.

    Attributes:
        groups: for each group of tensors, the names of each turn; the turns of a group take place in turn.
    """

    groups: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def num_saves(self) -> int:
        """Saves within which every tensor is copied."""
        return max((len(turns) for turns in self.groups), default=0)

    def names_at(self, save: int, attempt: int) -> Iterator[str]:
        """Yield the names that are due.

        Args:
            save: number of the save in its attempt, from 0.
            attempt: it shifts the turns, so that attempts that end early do not copy the same few.
        """
        for turns in self.groups:
            first = int(attempt * _GOLDEN * len(turns))
            yield from turns[(first + save) % len(turns)]
