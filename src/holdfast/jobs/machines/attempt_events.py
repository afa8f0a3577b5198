"""Events of the machines of an attempt that has ended, from its outcomes and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.jobs.machines.record import MachineEvent
from holdfast.jobs.node.checks.result import NodeChecks, describe_failures
from holdfast.jobs.outcome import Outcome, Phase


def attempt_events(
    machines: Sequence[str],
    outcomes: Mapping[int, Outcome],
    checks: Mapping[int, NodeChecks],
    *,
    job: str,
    attempt: int,
    unix_s: float,
    is_preempted: bool,
    gone: frozenset[str] | None = None,
) -> list[MachineEvent]:
    """Return one event per machine; pure.

    Args:
        machines: names of the machines, by rank.
        outcomes: outcomes of the nodes, by rank. A node without one was lost.
        checks: results of the checks, by rank.
        job: task id of the job.
        is_preempted: the attempt was preempted or cancelled, so a lost node is nobody's fault.
        gone: machines that have failed, as the engine has found. If all nodes of several were lost at once,
            only these have lost the attempt: with their first one, all others end too.
    """
    ends = [outcomes.get(rank, Outcome(Phase.RUN)) for rank in range(len(machines))]
    lost = {rank for rank, one in enumerate(ends) if (one.is_lost and not one.is_stopped) or one.unfit}
    if is_preempted:
        lost = {rank for rank in lost if ends[rank].unfit}
    elif len(lost) == len(machines) > 1 and len(set(machines)) > 1 and not any(one.unfit for one in ends):
        lost = {rank for rank in lost if machines[rank] in (gone or ())}
    found: dict[str, MachineEvent] = {}
    for rank, machine in enumerate(machines):
        failed = checks[rank].failed if rank in checks else ()
        why = ends[rank].describe() if rank in lost else describe_failures(failed)
        event = MachineEvent(
            unix_s=unix_s,
            machine=machine,
            job=job,
            attempt=attempt,
            is_lost=rank in lost,
            is_wrong=any(one.is_wrong for one in failed),
            failed=tuple(sorted({one.name for one in failed})),
            why=why,
        )
        found[machine] = _worse(found.get(machine), event)
    return list(found.values())


def _worse(one: MachineEvent | None, other: MachineEvent) -> MachineEvent:
    """Return the worse of two events of nodes on one machine, which counts once."""
    if one is None:
        return other
    return max(one, other, key=lambda event: (event.is_wrong, event.is_lost, len(event.failed)))
