"""Events of the machines of all jobs: what an attempt has shown of them, and one file per state folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.jobs import journal
from holdfast.jobs.node.checks.result import NodeChecks, describe_failures
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.system.linux.files import write_atomic

MAX_BYTES = 2 << 20
"""Size at which older events are removed."""
KEPT_EVENTS = 4000
REMEMBERED_S = 30 * 86400.0
"""Time after which an event is forgotten."""
MAX_NAME = 255
_MAX_WHY = 300
_FILE, _LOCK = "nodes.jsonl", "nodes.lock"


@dataclass(frozen=True, slots=True)
class MachineEvent:
    """Event of a machine: an attempt of a job has ended there, or the user has cleared it.

    Attributes:
        unix_s: time of the event.
        machine: name of the machine.
        job: task id of the job; empty for a machine that was cleared.
        attempt: number of the attempt.
        is_lost: the attempt was lost because of this machine.
        is_wrong: a check returned a wrong result there.
        failed: names of failed checks.
        why: why it was lost, or which checks failed, for people.
    """

    unix_s: float
    machine: str
    job: str = ""
    attempt: int = 0
    is_lost: bool = False
    is_wrong: bool = False
    failed: tuple[str, ...] = ()
    why: str = ""

    @property
    def is_clear(self) -> bool:
        """True if the user has cleared the machine."""
        return not self.job


def add_events(state: Path, events: Iterable[MachineEvent]) -> None:
    """Append events to the record of a state folder."""
    lines = [journal.encode(_shortened(one)) for one in events]
    if not lines:
        return
    path = state / _FILE
    with journal.locked(state / _LOCK):
        with journal.locked(path) as fd:
            journal.append(fd, "\n".join(lines), is_durable=False)
            is_large = os.fstat(fd).st_size > MAX_BYTES
        if is_large:
            kept = read_events(state)[-KEPT_EVENTS:]
            write_atomic(path, "".join(f"{journal.encode(one)}\n" for one in kept))


def read_events(state: Path, *, now_unix_s: float | None = None) -> list[MachineEvent]:
    """Return the events that are not forgotten, oldest first. Damaged lines are left out."""
    now_s = time.time() if now_unix_s is None else now_unix_s
    path = state / _FILE
    try:
        found = journal.read_values(path, MachineEvent, tail_bytes=2 * MAX_BYTES)
    except OSError:
        return []
    return since_cleared(
        [
            event
            for event in found
            if 0 < len(event.machine) <= MAX_NAME and event.unix_s >= now_s - REMEMBERED_S
        ]
    )


def since_cleared(events: list[MachineEvent]) -> list[MachineEvent]:
    """Return the events of each machine after it was last cleared; pure."""
    cleared: dict[str, int] = {}
    for position, event in enumerate(events):
        if event.is_clear:
            cleared[event.machine] = position
    return [
        event
        for position, event in enumerate(events)
        if not event.is_clear and position > cleared.get(event.machine, -1)
    ]


def _shortened(event: MachineEvent) -> MachineEvent:
    return MachineEvent(
        event.unix_s,
        event.machine[:MAX_NAME],
        event.job,
        event.attempt,
        event.is_lost,
        event.is_wrong,
        event.failed[:16],
        event.why[:_MAX_WHY],
    )


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
