"""Exclusion of machines that stand out, as far as a job can do without them; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.jobs.machines.judgement import NodeStanding

MAX_SHARE = 0.1
"""Greatest share of the usable machines that is left out, except that one always may be."""


def choose_excluded(
    standings: Sequence[NodeStanding], usable: Collection[str], *, num_nodes: int
) -> tuple[str, ...]:
    """Return the machines to leave out, the most conspicuous first.

    Args:
        standings: all machines, the most conspicuous first.
        usable: machines on which the job may run now or soon.
        num_nodes: machines that the job needs.
    """
    room = min(max(1, int(len(usable) * MAX_SHARE)), len(usable) - num_nodes)
    chosen = [one.name for one in standings if one.stands_out and one.name in usable]
    return tuple(chosen[: max(0, room)])
