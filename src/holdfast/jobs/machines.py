"""Machines of all jobs: attempts that they have lost, failed checks, and the ones that stand out.

Two exact tests compare a machine with the others, and the smaller probability counts, doubled:

- Within jobs. Each job compares its own machines: of its losses, given how often each machine took part, as
  many as were seen or more fall to this one by chance. A job that loses any machine accuses none.
- Across jobs. A job counts once per machine, lost there or not. One job that kills its machine each time adds
  one to the count.

The probability is multiplied by the number of machines, as one of many has bad luck.

Source: Fisher's exact test, stratified; "lemon nodes" of Kokolis et al., arXiv 2410.21680; counts of excluded
nodes in arXiv 2605.09370.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.jobs import journal
from holdfast.jobs.node.checks.result import NodeChecks, describe_failures
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus
from holdfast.system.linux.files import write_atomic

MAX_BYTES = 2 << 20  # size at which older events are removed
KEPT_EVENTS = 4000
REMEMBERED_S = 30 * 86400.0  # time after which an event is forgotten
MAX_NAME = 255
_MAX_WHY = 300
_FILE, _LOCK = "nodes.jsonl", "nodes.lock"
MIN_LOST = 3  # attempts that a machine must have lost before it can stand out
MAX_CHANCE = 0.01  # greatest probability of its losses by chance for a machine that stands out
_NEWEST_REASONS = 3


class MachineEvent(Struct, frozen=True):
    """Event of a machine: an attempt of a job has ended there, or the user has cleared it."""

    unix_s: float  # time of the event
    machine: str  # name of the machine
    job: str = ""  # task id of the job; empty for a machine that was cleared
    attempt: int = 0  # number of the attempt
    is_lost: bool = False  # the attempt was lost because of this machine
    is_wrong: bool = False  # a check returned a wrong result there
    failed: tuple[str, ...] = ()  # names of failed checks
    why: str = ""  # why it was lost, or which checks failed, for people


def add_events(state: Path, events: Iterable[MachineEvent]) -> None:
    """Append events to the record of a state folder."""
    lines: list[str] = []
    for event in events:
        short = {
            "machine": event.machine[:MAX_NAME],
            "failed": event.failed[:16],
            "why": event.why[:_MAX_WHY],
        }
        lines.append(journal.encode(replace(event, **short)))
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


def read_events(state: Path) -> list[MachineEvent]:
    """Return the events that are neither forgotten nor cleared, oldest first, without damaged lines."""
    oldest_s = time.time() - REMEMBERED_S
    try:
        found = journal.read_values(state / _FILE, MachineEvent, tail_bytes=2 * MAX_BYTES)
    except OSError:
        return []
    named = (event for event in found if 0 < len(event.machine) <= MAX_NAME)
    events = [event for event in named if event.unix_s >= oldest_s]
    cleared = {event.machine: position for position, event in enumerate(events) if not event.job}
    return [event for position, event in enumerate(events) if position > cleared.get(event.machine, -1)]


def attempt_events(
    machines: Sequence[str],
    ended: JobState,
    checks: Mapping[int, NodeChecks | None],
    *,
    job: str,
    gone: frozenset[str] = frozenset(),
) -> list[MachineEvent]:
    """Return one event per machine of an attempt that has ended, by rank.

    If all nodes of several machines were lost at once, only those in `gone`, which the engine has found to
    have failed, have lost the attempt: with their first one, all others end too.
    """
    ends = [ended.outcomes.get(rank, Outcome(Phase.RUN)) for rank in range(len(machines))]
    lost = {rank for rank, one in enumerate(ends) if (one.is_lost and not one.is_stopped) or one.unfit}
    if ended.is_noticed or ended.status is JobStatus.CANCELLING:  # a lost node is nobody's fault
        lost = {rank for rank in lost if ends[rank].unfit}
    elif len(lost) == len(machines) > 1 and len(set(machines)) > 1 and not any(one.unfit for one in ends):
        lost = {rank for rank in lost if machines[rank] in gone}
    found: dict[str, MachineEvent] = {}
    for rank, machine in enumerate(machines):
        failed = checked.failed if (checked := checks.get(rank)) else ()
        why = ends[rank].describe() if rank in lost else describe_failures(failed)
        event = MachineEvent(
            unix_s=time.time(),
            machine=machine,
            job=job,
            attempt=ended.attempt,
            is_lost=rank in lost,
            is_wrong=any(one.is_wrong for one in failed),
            failed=tuple(sorted({one.name for one in failed})),
            why=why,
        )
        of_both = (found.get(machine, event), event)  # the worse one of two nodes of a machine counts
        found[machine] = max(of_both, key=lambda event: (event.is_wrong, event.is_lost, len(event.failed)))
    return list(found.values())


class NodeStanding(Struct, frozen=True):
    """Standing of a machine on which jobs have run.

    Attributes:
        name: name of the machine.
        attempts: attempts that ran on it, in the last 30 days and since it was cleared.
        lost: of these, attempts that were lost because of it.
        failed_checks: number of failed checks, by name.
        wrong_results: attempts before which it returned a wrong result.
        chance: probability that a machine like the others loses as many, for any of them.
        stands_out: it is left out of new attempts where that is possible.
        reasons: the newest reasons, newest first.
        newest_unix_s: time of its newest event.
        lost_unix_s: time of its newest loss or failed check; None if it has neither.
    """

    name: str
    attempts: int
    lost: int
    failed_checks: Mapping[str, int]
    wrong_results: int
    chance: float
    stands_out: bool
    reasons: tuple[str, ...]
    newest_unix_s: float
    lost_unix_s: float | None


def judge(events: Sequence[MachineEvent]) -> list[NodeStanding]:
    """Return the standing of each machine, the most conspicuous first."""
    by_machine: dict[str, list[MachineEvent]] = defaultdict(list)
    for event in events:
        by_machine[event.machine].append(event)
    chances = _chances(events)
    found = [_standing(name, own, chances[name]) for name, own in by_machine.items()]
    return sorted(found, key=lambda node: (not node.stands_out, node.chance, -node.lost, node.name))


def _standing(name: str, events: Sequence[MachineEvent], chance: float) -> NodeStanding:
    lost = [one for one in events if one.is_lost]
    troubled = [one for one in events if one.is_lost or one.failed]
    num_wrong = sum(one.is_wrong for one in events)
    reasons = dict.fromkeys(one.why for one in reversed(troubled) if one.why)
    return NodeStanding(
        name=name,
        attempts=len(events),
        lost=len(lost),
        failed_checks=dict(Counter(check for one in events for check in one.failed)),
        wrong_results=num_wrong,
        chance=chance,
        stands_out=num_wrong > 0 or (len(lost) >= MIN_LOST and chance <= MAX_CHANCE),
        reasons=tuple(reasons)[:_NEWEST_REASONS],
        newest_unix_s=max(one.unix_s for one in events),
        lost_unix_s=max((one.unix_s for one in troubled), default=None),
    )


def _chances(events: Sequence[MachineEvent]) -> dict[str, float]:
    """Return the probability of each machine's losses by chance, corrected for the number of comparisons."""
    runs = Counter((one.machine, one.job) for one in events)
    losses = Counter((one.machine, one.job) for one in events if one.is_lost)
    job_runs = Counter(one.job for one in events)
    job_losses = Counter(one.job for one in events if one.is_lost)
    pairs_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for pair in runs:
        pairs_of[pair[0]].append(pair)
    found: dict[str, float] = {}
    for machine, pairs in pairs_of.items():
        within = [
            (runs[pair], losses[pair], job_runs[pair[1]] - runs[pair], job_losses[pair[1]] - losses[pair])
            for pair in pairs
            if runs[pair] < job_runs[pair[1]] and job_losses[pair[1]]
        ]
        own_lost = sum(pair in losses for pair in pairs)
        across = (len(pairs), own_lost, len(runs) - len(pairs), len(losses) - own_lost)
        least = min(stratified_tail(within), stratified_tail([across])) if own_lost else 1.0
        found[machine] = min(1.0, 2 * len(pairs_of) * least)
    return found


def stratified_tail(strata: Iterable[tuple[int, int, int, int]]) -> float:
    """Return the probability of at least as many losses on a machine as were seen, in all strata."""
    chances = [1.0]  # by number of losses on the machine
    seen = 0
    for runs, lost, other_runs, other_lost in strata:  # attempts and losses there, and elsewhere
        seen += lost
        chances = _convolved(chances, _hypergeometric(runs + other_runs, lost + other_lost, runs))
    return min(1.0, math.fsum(chances[seen:]))


def _hypergeometric(total: int, marked: int, drawn: int) -> list[float]:
    """Return the probabilities of 0, 1, ... marked ones among `drawn` of `total`."""
    whole = math.comb(total, drawn)
    return [
        math.comb(marked, number) * math.comb(total - marked, drawn - number) / whole
        for number in range(min(marked, drawn) + 1)
    ]


def _convolved(first: Sequence[float], other: Sequence[float]) -> list[float]:
    found = [0.0] * (len(first) + len(other) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(other):
            found[i + j] += a * b
    return found
