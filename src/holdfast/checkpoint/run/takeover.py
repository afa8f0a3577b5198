"""Claim of the next attempt by all ranks together: the home and every host's local folder."""

from __future__ import annotations

import socket

from holdfast.checkpoint.format import run as runs
from holdfast.checkpoint.home.writer import LiveTrainer
from holdfast.checkpoint.keeper import find_trainers
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.run.tiers import Base, Tiers


def claim_together(
    tiers: Tiers,
    ranks: RankGroup,
    local_ranks: tuple[int, ...],
    *,
    base: Base | None,
    is_fresh: bool,
    take_over: bool,
) -> runs.AttemptClaim:
    """Claim the next attempt for all ranks.

    Args:
        local_ranks: ranks that share this one's local folder.
        base: checkpoint that training continues; None if it is restored after the claim.
        is_fresh: nothing was restored and nothing will be, so the home must be empty.
        take_over: also claim a home that a living process saves to.

    Ranks: collective.
    """
    writers = [] if take_over else find_trainers(tiers.home)
    host = socket.gethostname()
    rows = ranks.gather([(host, one.attempt, one.rank, one.pid) for one in writers])
    above = max(ranks.gather(tiers.newest_local_number()))

    def claim() -> bytes:
        if is_fresh:
            tiers.refuse_unrestored()
        claimed = tiers.claim(
            world_size=ranks.world_size,
            base=base,
            above=above,
            writers=[(host, LiveTrainer(*row)) for rows_of_rank in rows for host, *row in rows_of_rank],
        )
        return runs.document(claimed)

    claimed = runs.parse(runs.AttemptClaim, ranks.of_rank_0(claim), "the claim")
    if base is not None:  # once more: after the claim no older attempt commits
        ranks.of_rank_0(lambda: tiers.check_fresh(base))
    if tiers.local is not None:
        firsts = {ranks_of_host[0] for ranks_of_host in ranks.gather(local_ranks)}
        to_join = firsts if len(firsts) > 1 else ()  # on one host, rank 0 has joined with its claim
        ranks.first_of(to_join, lambda: tiers.join(claimed, fresh=is_fresh))
    return claimed
