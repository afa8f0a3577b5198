"""Which rank writes which replicated tensor: computed alike by every rank, without communication."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping


def assign(
    sizes: Mapping[str, int], per_rank: Collection[str], lowest: Collection[str], *, world_size: int
) -> dict[str, int]:
    """Spread replicated tensors over the ranks, evenly by bytes.

    The largest tensor goes first, each onto the rank with the fewest bytes so far; names and rank numbers
    break ties, so the order of `sizes` does not matter.

    Args:
        sizes: bytes of every tensor by name.
        per_rank: names of which every rank writes its own; they are absent from the answer.
        lowest: names that rank 0 writes.
        world_size: number of ranks.

    Returns:
        The writing rank of every name that is not per rank.

    Ranks: not collective; every rank computes the same from the same arguments.
    Source: longest-processing-time-first scheduling, R. L. Graham, 1969.
    """
    own, fixed = frozenset(per_rank), frozenset(lowest)
    owners = {name: 0 for name in sizes if name in fixed and name not in own}
    loads = [(0, rank) for rank in range(world_size)]
    loads[0] = (sum(sizes[name] for name in owners), 0)
    heapq.heapify(loads)
    spread = [name for name in sizes if name not in own and name not in fixed]
    for name in sorted(spread, key=lambda name: (-sizes[name], name)):
        num_bytes, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (num_bytes + sizes[name], rank))
    return owners
