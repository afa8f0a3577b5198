"""Nodes that a Slurm job leaves out, because they stand out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.errors import RetryLater, Unsupported
from holdfast.jobs.machines import NodeStanding, judge, read_events
from holdfast.jobs.slurm import commands
from holdfast.system.log import get_logger

_log = get_logger("jobs")
MAX_SHARE = 0.1
"""Greatest share of the usable machines that is left out, except that one always may be."""


def choose_left_out(
    state: Path, script: Path, num_nodes: int, *, partition: str, unwanted: str, is_pinned: bool
) -> tuple[str, ...]:
    """Return the nodes that stand out and that a job can do without.

    Args:
        state: folder of all jobs.
        script: the job's script, which Slurm tests without them.
        num_nodes: nodes that the job needs.
        partition: its partition; empty: the default one.
        unwanted: nodes that its user leaves out, separated by commas.
        is_pinned: its user has named its nodes.
    """
    standings = [] if is_pinned else judge(read_events(state))
    if not any(one.stands_out for one in standings):
        return ()
    try:
        left_out = commands.node_names(unwanted) if unwanted else ()
        usable = [name for name in commands.usable_nodes(partition) if name not in left_out]
        chosen = choose_excluded(standings, usable, num_nodes=num_nodes)
        # Slurm knows more about its nodes: their memory, devices and features.
        return chosen if chosen and commands.can_run_without(script, joined(chosen, unwanted)) else ()
    except (RetryLater, Unsupported) as error:
        _log.warning("no node is left out: %s", error)
        return ()


def joined(names: tuple[str, ...], unwanted: str) -> str:
    """Return a list of nodes for Slurm: some names, and those that the user leaves out."""
    return ",".join(filter(None, (unwanted, *names)))


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
