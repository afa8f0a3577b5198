"""Judgement of machines that stand out by the attempts they have lost; pure.

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
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.jobs.machines.record import MachineEvent

MIN_LOST = 3
"""Attempts that a machine must have lost before it can stand out."""
MAX_CHANCE = 0.01
"""Greatest probability of its losses by chance for a machine that stands out."""
_NEWEST_REASONS = 3


@dataclass(frozen=True, slots=True)
class NodeStanding:
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
    return sorted(found, key=lambda one: (not one.stands_out, one.chance, -one.lost, one.name))


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


def _chances(events: Iterable[MachineEvent]) -> dict[str, float]:
    """Return the probability of each machine's losses by chance, corrected for the number of comparisons."""
    cells: dict[str, dict[str, _Count]] = defaultdict(lambda: defaultdict(_Count))  # by machine and job
    jobs: dict[str, _Count] = defaultdict(_Count)
    for event in events:
        for count in (cells[event.machine][event.job], jobs[event.job]):
            count.runs += 1
            count.lost += event.is_lost
    num_pairs = sum(map(len, cells.values()))
    num_lost = sum(one.lost > 0 for of_machine in cells.values() for one in of_machine.values())
    found: dict[str, float] = {}
    for machine, own in cells.items():
        within = [
            (one.runs, one.lost, jobs[job].runs - one.runs, jobs[job].lost - one.lost)
            for job, one in own.items()
            if one.runs < jobs[job].runs and jobs[job].lost
        ]
        own_lost = sum(one.lost > 0 for one in own.values())
        across = (len(own), own_lost, num_pairs - len(own), num_lost - own_lost)
        least = min(stratified_tail(within), stratified_tail([across])) if own_lost else 1.0
        found[machine] = min(1.0, 2 * len(cells) * least)
    return found


@dataclass(slots=True)
class _Count:
    runs: int = 0
    lost: int = 0


def stratified_tail(strata: Iterable[tuple[int, int, int, int]]) -> float:
    """Return the probability of at least as many losses on a machine as were seen.

    Args:
        strata: per stratum its attempts and losses on the machine, then those on the others.
    """
    chances = [1.0]  # by number of losses on the machine
    seen = 0
    for runs, lost, other_runs, other_lost in strata:
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


def _convolved(one: Sequence[float], other: Sequence[float]) -> list[float]:
    found = [0.0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            found[i + j] += a * b
    return found
