"""Each save of a run and what became of it in every tier; pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.report.events import TIERS, Event

DURABLE, UNFINISHED = "durable", "unfinished"
"""Outcomes, besides the kinds of events that end a save without a checkpoint."""

_ENDED = ("skipped", "dropped", "failed", "fenced")
_OWN = ("saved", "staged", "persisted", "committed")  # the order in which their bytes are believed
_OF_ATTEMPT = re.compile(
    r"\battempt ([0-9]{1,19})(?![0-9])"
)  # whose checkpoint it was, where the teller is another attempt


@dataclass(frozen=True, slots=True)
class Copy:
    """One checkpoint in one tier."""

    tier: str
    write_s: float | None  # the slowest rank's writing, or draining; None if it was not told
    durable_unix_s: float | None  # None: it never came to a commit in this tier, as far as is known
    durable_s: float | None  # from save() to durable in this tier
    num_bytes: int
    was_drained: bool = False

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes of all ranks by the time of the slowest."""
        return self.num_bytes / self.write_s if self.num_bytes and self.write_s else None


@dataclass(frozen=True, slots=True)
class Save:
    """One call of `save`, all ranks together."""

    step: int
    attempt: int
    num_ranks: int  # that told of it
    num_bytes: int
    began_unix_s: float
    back_unix_s: float | None  # when save() gave the training loop back; None if it never did
    blocked_s: float | None  # what save() took from the loop of the slowest rank
    staged_s: float | None  # from save() until nothing that training does could change it
    outcome: str
    detail: str
    copies: tuple[Copy, ...]  # nearest tier first

    @property
    def durable(self) -> Copy | None:
        """Its copy in the farthest tier that has it."""
        return next((copy for copy in reversed(self.copies) if copy.durable_unix_s is not None), None)


def saves_of(events: Iterable[Event]) -> list[Save]:
    """Every save that events tell of, by attempt and step."""
    grouped: dict[tuple[int, int], list[Event]] = {}
    by_others: list[Event] = []  # perhaps by a later attempt than the one that saved
    for event in events:
        if event.step is None:
            continue
        if event.kind == "drained" or (event.kind == "committed" and _OF_ATTEMPT.match(event.detail)):
            by_others.append(event)
        elif event.kind in (*_OWN, *_ENDED):
            grouped.setdefault((event.attempt, event.step), []).append(event)
    for event in by_others:
        owner = owner_of(event, grouped)
        if owner is not None:
            grouped[owner].append(event)
    return [_save(attempt, step, told) for (attempt, step), told in sorted(grouped.items())]


def owner_of(event: Event, known: Collection[tuple[int, int]]) -> tuple[int, int] | None:
    """The checkpoint that a commit, a drain, a deletion or a restore is about; None if none is known.

    An attempt also commits, drains and deletes what attempts before it have saved. The detail may say whose
    it was; else it is taken for the newest of that step.

    Args:
        event: what happened.
        known: attempt and step of checkpoints.
    """
    named = _OF_ATTEMPT.match(event.detail)
    if named:
        one = int(named[1]), event.step or 0
        return one if one in known else None
    last = event.attempt - 1 if event.kind == "restored" else event.attempt
    return max((one for one in known if one[1] == event.step and one[0] <= last), default=None)


def _save(attempt: int, step: int, told: Sequence[Event]) -> Save:
    saved = [event for event in told if event.kind == "saved"]
    staged = [event for event in told if event.kind == "staged"]
    num_bytes = sum(_bytes_of_ranks(told).values())
    began = _began(told)
    copies = tuple(
        _copy(tier, [event for event in told if event.tier == tier], began, num_bytes)
        for tier in _tiers_of(told)
    )
    ended = [event for event in told if event.kind in _ENDED]
    is_durable = any(copy.durable_unix_s is not None for copy in copies)
    return Save(
        step=step,
        attempt=attempt,
        num_ranks=len({event.rank for event in told}),
        num_bytes=num_bytes,
        began_unix_s=began,
        back_unix_s=max((event.unix_s for event in saved), default=None),
        blocked_s=max((event.seconds for event in saved), default=None),
        staged_s=max((event.seconds for event in staged), default=None),
        outcome=DURABLE if is_durable else ended[0].kind if ended else UNFINISHED,
        detail="" if is_durable or not ended else ended[0].detail,
        copies=copies,
    )


def _began(told: Sequence[Event]) -> float:
    """When `save` was called: told by save() itself, else by what came next."""
    for kinds in (("saved",), ("staged",), ("persisted",)):
        starts = [event.unix_s - event.seconds for event in told if event.kind in kinds]
        if starts:
            return min(starts)
    return min(event.unix_s for event in told)


def _bytes_of_ranks(told: Sequence[Event]) -> dict[int, int]:
    found: dict[int, int] = {}
    for kind in (*_OWN, "drained"):
        for event in told:
            if event.kind == kind and event.num_bytes and not found.get(event.rank):
                found[event.rank] = event.num_bytes
        if kind == "persisted" and found:
            break  # what is told later may be the sum of all ranks, told by one
    return found


def _tiers_of(told: Sequence[Event]) -> list[str]:
    there = {event.tier for event in told if event.kind in ("persisted", "committed", "drained")}
    return [*(tier for tier in TIERS if tier in there), *sorted(there - set(TIERS))]


def _copy(tier: str, told: Sequence[Event], began: float, num_bytes: int) -> Copy:
    drained = [event for event in told if event.kind == "drained"]
    written = drained or [event for event in told if event.kind == "persisted"]
    committed = [event.unix_s for event in told if event.kind == "committed"]
    # Rank 0 commits, and the others see it later; of a drain, the last rank's makes it whole.
    durable = min(committed) if committed else max((event.unix_s for event in drained), default=None)
    return Copy(
        tier,
        write_s=max((event.seconds for event in written), default=None),
        durable_unix_s=durable,
        durable_s=None if durable is None else max(0.0, durable - began),
        num_bytes=num_bytes,
        was_drained=bool(drained),
    )
