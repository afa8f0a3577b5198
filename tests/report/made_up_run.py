"""Made-up runs with their true costs, for tests of the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import Self

from holdfast.checkpoint.format import run
from holdfast.watch.report.saves import HistoryEvent

START = 1_700_000_000.0


@dataclass
class MadeUpRun:
    """Events and claims of a run, in seconds since its start."""

    events: list[HistoryEvent] = field(default_factory=list)
    claims: dict[int, run.AttemptClaim] = field(default_factory=dict)

    def claim(self, number: int, at_s: float, *, pid: int | None = None, host: str = "kelp") -> Self:
        """Add an attempt's claim."""
        pid = 100 + number if pid is None else pid
        self.claims[number] = run.AttemptClaim(number, "run", 1, host, pid, START + at_s)
        return self

    def add(
        self,
        attempt: int,
        at_s: float,
        kind: str,
        step: int | None = None,
        *,
        seconds: float = 0.0,
        rank: int = 0,
        num_bytes: int = 0,
        tier: str = "home",
        detail: str = "",
    ) -> Self:
        """Add an event."""
        self.events.append(
            HistoryEvent(START + at_s, kind, step, attempt, rank, tier, num_bytes, seconds, detail)
        )
        return self

    def add_metrics(self, attempt: int, at_s: float, name: str, values: Mapping[int, float]) -> Self:
        """Add values of a metric by step."""
        numbers = tuple((name, step, value) for step, value in values.items())
        self.events.append(HistoryEvent(START + at_s, "metrics", max(values), attempt, numbers=numbers))
        return self

    def save(
        self,
        attempt: int,
        step: int,
        at_s: float,
        *,
        blocked_s: float = 0.0,
        durable_after_s: float | None = 1.0,
        num_bytes: int = 1000,
        tier: str = "home",
    ) -> Self:
        """Add a save by one rank: `save()` called at `at_s`; not durable if `durable_after_s` is None."""
        back = at_s + blocked_s
        self.add(attempt, back, "saved", step, seconds=blocked_s, num_bytes=num_bytes)
        self.add(attempt, back, "staged", step, seconds=blocked_s, num_bytes=num_bytes)
        for kind in ("persisted", "committed") if durable_after_s is not None else ():
            took_s = durable_after_s or 0.0
            self.add(attempt, at_s + took_s, kind, step, seconds=took_s, num_bytes=num_bytes, tier=tier)
        return self

    def save_each(self, *steps: int, blocked_s: float = 0.0) -> Self:
        """Add the claim of attempt 1 and its saves, each after as many seconds as steps."""
        self.claim(1, 0.0)
        for step in steps:
            self.save(1, step, float(step), blocked_s=blocked_s)
        return self

    def by_time(self) -> list[HistoryEvent]:
        """Return all events by time."""
        return sorted(self.events, key=lambda event: event.unix_s)


@dataclass(frozen=True)
class Fate:
    """Fate of one attempt of a simulated run."""

    num_steps: int  # it makes before it is killed
    into_step_s: float  # how far into the next step it is then
    outage_s: float  # until the next attempt claims its number
    restore_s: float
    num_damaged: int  # newest checkpoints that the next attempt has to pass over


@dataclass
class Simulated:
    """A run with its true costs."""

    made_up: MadeUpRun
    total_s: float
    useful_s: float  # training whose result stands, with the save() calls in it
    steps_lost: list[int]  # true, by interruption


def simulate(fates: Sequence[Fate], *, every: int, step_s: float, blocked_s: float) -> Simulated:
    """Simulate training with kills and resumes, and record the true costs.

    The account goes along the checkpoints: each knows how much useful time led to it.
    """
    made_up = MadeUpRun()
    useful_at: dict[tuple[int, int], float] = {}  # by attempt and step
    at = total = useful = seen_useful = 0.0
    step, reached, damaged = 0, 0, 0
    lost: list[int] = []
    for number, fate in enumerate(fates, start=1):
        made_up.claim(number, at)
        order = sorted(useful_at, reverse=True)
        passed, left = order[:damaged], order[damaged:]
        if number > 1:
            step, useful = (left[0][1], useful_at[left[0]]) if left else (0, 0.0)
            lost.append(reached - step)
        for one in passed if left else []:
            del useful_at[one]
        if not left:
            useful_at.clear()
        at += fate.restore_s if left else 0.0
        if left:
            detail = "; ".join(f"skipped step {old} of attempt {of}: rotten" for of, old in passed)
            made_up.add(number, at, "restored", step, seconds=fate.restore_s, detail=detail)
        # The last event counts, not the end: a kill leaves no event.
        total, seen_useful = at, useful
        for _ in range(fate.num_steps):
            at, useful, step = at + step_s, useful + step_s, step + 1
            if step % every == 0:
                made_up.save(number, step, at, blocked_s=blocked_s)
                at, useful = at + blocked_s, useful + blocked_s
                useful_at[number, step] = useful
                total, seen_useful = at, useful
        reached = step
        damaged = fate.num_damaged
        at += fate.into_step_s * step_s + fate.outage_s
    return Simulated(made_up, total, seen_useful, lost)
