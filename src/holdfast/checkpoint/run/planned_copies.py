"""Copies that watches have planned for one state: their names at each save, and their places in the arena."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.stage import WITNESS_ALIGNMENT, SavePlan


@dataclass(frozen=True, slots=True)
class PlacedCopy:
    """Copy of a tensor in the arena: index in the plan, offset and size in bytes."""

    tensor: SharedTensor
    index: int
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SaveCopies:
    """Copies of one save.

    Attributes:
        witnesses: offset in the arena of each tensor that is copied for this alone, by its index in the plan.
        by_watch: copies to hash, by the name of the watch.
        has_room: the memory has room for what other ranks write.
    """

    witnesses: Mapping[int, int]
    by_watch: Mapping[str, tuple[PlacedCopy, ...]]
    has_room: bool = True

    def without(self, torn: Collection[int]) -> dict[str, tuple[PlacedCopy, ...]]:
        """Return the copies but those at some indices, which may mix two moments."""
        return {
            name: tuple(one for one in copies if one.index not in torn)
            for name, copies in self.by_watch.items()
        }


@dataclass(frozen=True, slots=True)
class PlannedCopies:
    """Copies of one state, valid while its structure stays the same.

    Attributes:
        by_watch: the tensors of each turn, by the name of the watch.
        tensors: tensors that other ranks hold too, by name.
        witnesses: names of the tensors that other ranks write.
        witness_bytes: most bytes of the witnesses of one save.
    """

    by_watch: Mapping[str, Copies]
    tensors: Mapping[str, SharedTensor]
    witnesses: tuple[str, ...]
    witness_bytes: int

    @classmethod
    def make(
        cls,
        by_watch: Mapping[str, Copies],
        shared: Iterable[SharedTensor],
        live: Mapping[str, torch.Tensor],
        catalog: Catalog,
        rank: int,
    ) -> PlannedCopies:
        """Return the copies of a state on one rank."""
        tensors = {one.name: one for one in shared}
        written = {name for name, _, _ in catalog.written_by(rank)}
        named = {
            name
            for copies in by_watch.values()
            for turns in copies.groups
            for turn in turns
            for name in turn
            if name in tensors
        }
        witnesses = tuple(name for name in tensors if name in named and name not in written)
        most = sum(_most_bytes(copies, live, frozenset(witnesses)) for copies in by_watch.values())
        return cls(by_watch, tensors, witnesses, most)

    def begin(self, plan: SavePlan, save: int, attempt: int) -> SaveCopies:
        """Return the copies of one save.

        Args:
            plan: with the witnesses, or without them if there is no memory for them.
            save: number of the save in its attempt, from 0.
        """
        if not self.by_watch:
            return SaveCopies({}, {})
        indices = {name: index for index, name in enumerate(plan.live_names)}
        witnesses: dict[int, int] = {}
        end = plan.witness_at
        by_watch: dict[str, tuple[PlacedCopy, ...]] = {}
        for watch, copies in self.by_watch.items():
            placed: list[PlacedCopy] = []
            for name in copies.names_at(save, attempt):
                index = indices.get(name)
                if index is None or name not in self.tensors:
                    continue
                if index < len(plan.names):
                    at, num_bytes = plan.position(index)
                else:
                    num_bytes = plan.witness_sizes[index - len(plan.names)]
                    at = witnesses.setdefault(index, end)
                    end += _aligned(num_bytes) if at == end else 0
                if num_bytes:
                    placed.append(PlacedCopy(self.tensors[name], index, at, num_bytes))
            by_watch[watch] = tuple(placed)
        return SaveCopies(witnesses, by_watch, has_room=plan.witnesses == self.witnesses)


def _most_bytes(copies: Copies, live: Mapping[str, torch.Tensor], names: Collection[str]) -> int:
    """Return the most bytes of these tensors at one save."""
    return sum(
        max(sum(_aligned(live[name].nbytes) for name in turn if name in names) for turn in turns)
        for turns in copies.groups
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // WITNESS_ALIGNMENT) * WITNESS_ALIGNMENT
