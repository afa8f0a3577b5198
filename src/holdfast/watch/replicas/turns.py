"""Turns of the comparison: the replicated tensors that are compared at each save, without communication."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from holdfast.checkpoint.copies import Copies, SharedTensor

MAX_TURNS = 64
"""Saves within which every tensor is compared, at most, unless the user chooses a number."""
FREE_BYTES = 64 << 20
"""Bytes of a rank that are compared at every save in any case: some 20 ms of processor time."""
_TURNS_PER_COPY = 8
"""A turn has an eighth of the bytes that a rank writes: it writes one of the copies' share."""


def turns_of(tensors: Sequence[SharedTensor], *, within: int | None) -> Copies:
    """Distribute the tensors that other ranks hold too over turns of about the same bytes.

    Args:
        within: saves within which every tensor is compared; None to bound the cost instead: a turn has an
            eighth of the bytes that the rank writes, or 64 MiB, and there are at most 64 turns.

    Ranks: not collective; ranks that hold the same tensors compute the same turns for them.
    """
    by_object: dict[int, list[SharedTensor]] = {}
    for one in tensors:
        by_object.setdefault(id(one.holders), []).append(one)
    by_holders: dict[tuple[tuple[int, ...], ...], list[SharedTensor]] = {}
    for members in by_object.values():  # few: hashing a thousand ranks for each tensor would take long
        by_holders.setdefault(members[0].holders, []).extend(members)
    return Copies(
        tuple(
            _turns(members, _num_turns(sum(one.num_bytes for one in members), len(holders), within))
            for holders, members in by_holders.items()
        )
    )


def _num_turns(num_bytes: int, num_copies: int, within: int | None) -> int:
    if within is not None:
        return within
    return max(1, min(-(-num_bytes // FREE_BYTES), _TURNS_PER_COPY * num_copies, MAX_TURNS))


def _turns(members: Sequence[SharedTensor], num_turns: int) -> tuple[tuple[str, ...], ...]:
    """Distribute tensors, the largest first, each to the turn with the fewest bytes so far."""
    loads = [(0, turn) for turn in range(num_turns)]
    turns: list[list[str]] = [[] for _ in range(num_turns)]
    for one in sorted(members, key=lambda member: (-member.num_bytes, member.name)):
        load, turn = loads[0]
        turns[turn].append(one.name)
        heapq.heapreplace(loads, (load + one.num_bytes, turn))
    return tuple(map(tuple, turns))
