"""Audit of replicas in the trainer: the tensors of each save, and their places in the arena."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from holdfast.checkpoint.format.audit import Replica, ReplicaAt
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.run.options import Audit
from holdfast.checkpoint.stage import WITNESS_ALIGNMENT, SavePlan
from holdfast.checkpoint.state import AuditTurns, CapturedState, audit_turns
from holdfast.system.units import plural


@dataclass(frozen=True, slots=True)
class AuditedSave:
    """Replicas that are hashed at one save.

    Attributes:
        witnesses: offset in the arena of each tensor that is copied for this alone, by its index in the plan.
        replicas: each replica with its index in the plan.
    """

    witnesses: Mapping[int, int]
    replicas: tuple[tuple[int, ReplicaAt], ...]

    def without(self, torn: Collection[int]) -> list[ReplicaAt]:
        """Return the replicas but those at some indices, whose copies may mix two moments."""
        return [one for index, one in self.replicas if index not in torn]


_NOTHING = AuditedSave({}, ())


@dataclass(frozen=True, slots=True)
class ReplicaAudit:
    """Audit of the replicas of one state, valid while its structure stays the same.

    Attributes:
        witnesses: names of the tensors that other ranks write.
        witness_bytes: most bytes of the witnesses of one save.
    """

    turns: AuditTurns
    witnesses: tuple[str, ...]
    witness_bytes: int
    _numbers: Mapping[str, int]  # of tensors in the catalog

    @classmethod
    def make(cls, captured: CapturedState, catalog: Catalog, rank: int, audit: Audit) -> ReplicaAudit:
        """Return the audit of a state by one rank."""
        turns = (
            AuditTurns({}, frozenset(), ())
            if audit.is_off
            else audit_turns(captured, rank, within=audit.num_turns)
        )
        written = {name for name, _, _ in catalog.written_by(rank)}
        witnesses = tuple(name for name in turns.regions if name not in written)
        return cls(
            turns,
            witnesses,
            _most_bytes(turns, captured.tensors, frozenset(witnesses)),
            {name: number for number, name in enumerate(catalog.tensors)},
        )

    def begin(self, plan: SavePlan, save: int, attempt: int) -> AuditedSave:
        """Return the replicas of one save.

        Args:
            plan: with the witnesses, or without them if there is no memory for them.
            save: number of the save in its attempt, from 0.
        """
        names = tuple(self.turns.names_at(save, attempt))
        if not names:
            return _NOTHING
        indices = {name: index for index, name in enumerate(plan.live_names)}
        witnesses: dict[int, int] = {}
        replicas: list[tuple[int, ReplicaAt]] = []
        end = plan.witness_at
        for name in names:
            index = indices.get(name)
            if index is None:
                continue
            if index < len(plan.names):
                at, num_bytes = plan.position(index)
            else:
                at, num_bytes = end, plan.witness_sizes[index - len(plan.names)]
                witnesses[index], end = at, end + _aligned(num_bytes)
            if num_bytes:
                replicas.append((index, ReplicaAt(self._replica(name), at, num_bytes)))
        return AuditedSave(witnesses, tuple(replicas))

    def _replica(self, name: str) -> Replica:
        return Replica(self._numbers[name], self.turns.regions[name], name in self.turns.trained)

    def describe(self, *, has_memory: bool) -> str:
        """Return the audit in words, for the history; empty if there is nothing to compare."""
        if not self.turns.regions:
            return ""
        if not has_memory:
            return "only the tensors that this rank writes are hashed: memory= has no room for others"
        tensors = plural(len(self.turns.regions), "replicated tensor")
        return f"{tensors}, each compared once in {plural(self.turns.num_saves, 'save')}"


def _most_bytes(turns: AuditTurns, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> int:
    """Return the most bytes of these tensors at one save."""
    return sum(
        max(sum(_aligned(tensors[name].nbytes) for name in turn if name in names) for turn in group)
        for group in turns.groups
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // WITNESS_ALIGNMENT) * WITNESS_ALIGNMENT
