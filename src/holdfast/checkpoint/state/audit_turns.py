"""Turns of the audit: the replicated tensors that are compared at each save, without communication."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.state.capture import CapturedState
from holdfast.checkpoint.state.sharding import ShardLayout
from holdfast.checkpoint.state.tensors import NAMES

MAX_TURNS = 64
"""Saves within which every tensor is compared, at most, unless the user chooses a number."""
FREE_BYTES = 64 << 20
"""Bytes of a rank that are compared at every save in any case: some 20 ms of processor time."""
_TURNS_PER_COPY = 8
"""A turn has an eighth of the bytes that a rank writes: it writes one of the copies' share."""
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class AuditTurns:
    """Turns of all tensors that a rank shares with others.

    Attributes:
        regions: number of the region that this rank holds, by name.
        trained: names that only an optimizer's step changes.
        groups: for each set of holders, the names of each turn.
    """

    regions: Mapping[str, int]
    trained: frozenset[str]
    groups: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def num_saves(self) -> int:
        """Saves within which every tensor is compared."""
        return max((len(turns) for turns in self.groups), default=0)

    def names_at(self, save: int, attempt: int) -> Iterator[str]:
        """Yield the names that are due.

        Args:
            save: number of the save in its attempt, from 0.
            attempt: it shifts the turns, so that attempts that end early do not compare the same few.
        """
        for turns in self.groups:
            first = int(attempt * _GOLDEN * len(turns))
            yield from turns[(first + save) % len(turns)]


def audit_turns(captured: CapturedState, rank: int, *, within: int | None) -> AuditTurns:
    """Distribute the tensors that other ranks hold too over turns of about the same bytes.

    Args:
        within: saves within which every tensor is compared; None to bound the cost instead: a turn has an
            eighth of the bytes that the rank writes, or 64 MiB, and there are at most 64 turns.

    Ranks: not collective; ranks that hold the same tensors compute the same turns for them.
    """
    regions: dict[str, int] = {}
    by_layout: dict[int, tuple[ShardLayout, list[tuple[int, str]]]] = {}
    for name, one in captured.shardings.items():
        layout = captured.lowest.get(name, one.layout)
        region, num_bytes = layout.region_number(rank), _bytes_of(captured, name, layout)
        if len(layout.copies) > 1 and region is not None and num_bytes:
            regions[name] = region
            by_layout.setdefault(id(layout), (layout, []))[1].append((num_bytes, name))
    by_copies: dict[tuple[tuple[int, ...], ...], list[tuple[int, str]]] = {}
    for (
        layout,
        members,
    ) in by_layout.values():  # few: hashing a thousand ranks for each tensor would take long
        by_copies.setdefault(layout.copies, []).extend(members)
    groups = tuple(
        _turns(members, _num_turns(sum(num_bytes for num_bytes, _ in members), len(copies), within))
        for copies, members in by_copies.items()
    )
    return AuditTurns(regions, captured.owned.intersection(regions), groups)


def _bytes_of(captured: CapturedState, name: str, layout: ShardLayout) -> int:
    """Return the bytes of a region, rounded up: the same on all holders, also on one with an empty region."""
    item_bytes = ITEM_BYTES[NAMES[captured.tensors[name].dtype]]
    return -(-math.prod(captured.shardings[name].shape) // len(layout.copies[0])) * item_bytes


def _num_turns(num_bytes: int, num_copies: int, within: int | None) -> int:
    if within is not None:
        return within
    return max(1, min(-(-num_bytes // FREE_BYTES), _TURNS_PER_COPY * num_copies, MAX_TURNS))


def _turns(members: list[tuple[int, str]], num_turns: int) -> tuple[tuple[str, ...], ...]:
    """Distribute tensors, the largest first, each to the turn with the fewest bytes so far."""
    loads = [(0, turn) for turn in range(num_turns)]
    turns: list[list[str]] = [[] for _ in range(num_turns)]
    for num_bytes, name in sorted(members, key=lambda member: (-member[0], member[1])):
        load, turn = loads[0]
        turns[turn].append(name)
        heapq.heapreplace(loads, (load + num_bytes, turn))
    return tuple(map(tuple, turns))
