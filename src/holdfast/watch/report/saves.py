"""Events of a run's history, and the saves and their copies that follow; pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.home.history import Line, is_count, is_number
from holdfast.checkpoint.home.metrics import Metric, metric_values

MEMORY, PEERS, LOCAL, HOME = "memory", "peers", "local", "home"
TIERS = (MEMORY, PEERS, LOCAL, HOME)  # tiers of a checkpoint, nearest first


METRICS = "metrics"  # kind of events with training metrics


class HistoryEvent(Struct, frozen=True):
    """One event. Missing members of its line have default values."""

    unix_s: float
    kind: str
    step: int | None = None
    attempt: int = 0
    rank: int = 0
    tier: str = HOME
    num_bytes: int = 0
    seconds: float = 0.0
    detail: str = ""
    numbers: tuple[Metric, ...] = ()  # of metrics

    @classmethod
    def from_line(cls, line: Line) -> HistoryEvent:
        """Return the event of a line. Members of a wrong type count as missing."""
        step = line.get("step")
        return cls(
            float(line["t"]),
            line["event"],
            step if is_count(step) else None,
            attempt=int(_amount(line, "attempt")),
            rank=int(_amount(line, "rank")),
            tier=tier_of(line),
            num_bytes=int(_amount(line, "bytes")),
            seconds=_amount(line, "seconds"),
            detail=str(line.get("detail") or ""),
            numbers=tuple(metric_values(line)) if line["event"] == METRICS else (),
        )


def tier_of(line: Line) -> str:
    """Return the tier of a line. Lines from before tiers existed are about home."""
    tier = line.get("tier")
    return tier if isinstance(tier, str) and tier else HOME


def parse_events(lines: Iterable[Line]) -> list[HistoryEvent]:
    """Parse lines into events, sorted by time."""
    return sorted((HistoryEvent.from_line(line) for line in lines), key=lambda event: event.unix_s)


def _amount(line: Line, name: str) -> float:
    value = line.get(name)
    return max(0, value) if isinstance(value, (int, float)) and is_number(value) else 0


DURABLE, UNFINISHED = "durable", "unfinished"
"""Outcomes, besides the kinds of events that end a save without a checkpoint."""

_ENDED = ("skipped", "dropped", "failed", "fenced")
_OWN = ("saved", "staged", "persisted", "committed")  # in the order of preference for byte counts
# The attempt of the checkpoint, if another attempt writes the event.
_OF_ATTEMPT = re.compile(r"\battempt ([0-9]{1,19})(?![0-9])")


class Copy(Struct, frozen=True):
    """A checkpoint in one tier."""

    tier: str
    write_s: float | None  # duration on the slowest rank; None if unknown
    durable_unix_s: float | None  # None: no recorded commit in this tier
    durable_s: float | None  # from save() to durable in this tier
    num_bytes: int
    was_drained: bool = False

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes of all ranks divided by the time of the slowest one."""
        return self.num_bytes / self.write_s if self.num_bytes and self.write_s else None


class SaveRecord(OfCheckpoint, Struct, frozen=True):
    """One call of `save`, on all ranks together."""

    step: int
    attempt: int
    num_ranks: int  # ranks with events
    num_bytes: int
    started_unix_s: float
    returned_unix_s: float | None  # return of save() to the training loop
    blocked_s: float | None  # duration of save() on the slowest rank
    staged_s: float | None  # from save() until training could no longer change it
    outcome: str
    detail: str
    copies: tuple[Copy, ...]  # nearest tier first

    @property
    def durable(self) -> Copy | None:
        """Its copy in the farthest tier, or None."""
        return next((copy for copy in reversed(self.copies) if copy.durable_unix_s is not None), None)

    @property
    def durable_s(self) -> float | None:
        """Time until it was durable in the nearest persistent tier."""
        times = (one.durable_s for one in self.copies if one.tier != MEMORY and one.durable_s is not None)
        return next(times, None)


def collect_saves(events: Iterable[HistoryEvent]) -> list[SaveRecord]:
    """Return every save in the events, by attempt and step."""
    grouped: dict[CheckpointId, list[HistoryEvent]] = {}
    by_others: list[HistoryEvent] = []  # may be from a later attempt than the save
    for event in events:
        if event.step is None:
            continue
        if event.kind == "drained" or (event.kind == "committed" and named_attempt(event) is not None):
            by_others.append(event)
        elif event.kind in (*_OWN, *_ENDED):
            own = CheckpointId(attempt=event.attempt, step=event.step)
            grouped.setdefault(own, []).append(event)
    for event in by_others:
        owner = checkpoint_of(event, grouped)
        if owner is not None:
            grouped[owner].append(event)
    return [_save(one, events) for one, events in sorted(grouped.items())]


def checkpoint_of(event: HistoryEvent, known: Collection[CheckpointId]) -> CheckpointId | None:
    """Return the checkpoint that a commit, drain or restore is about; None if it is unknown.

    An attempt also commits and drains checkpoints of earlier attempts. The detail may contain their attempt;
    otherwise the newest checkpoint of that step counts.
    """
    if (attempt := named_attempt(event)) is not None:
        checkpoint = CheckpointId(attempt=attempt, step=event.step or 0)
        return checkpoint if checkpoint in known else None
    last = event.attempt - 1 if event.kind == "restored" else event.attempt
    return max((one for one in known if one.step == event.step and one.attempt <= last), default=None)


def named_attempt(event: HistoryEvent) -> int | None:
    """Return the attempt of the checkpoint that an event is about, if its detail begins with it."""
    found = _OF_ATTEMPT.match(event.detail)
    return int(found[1]) if found else None


def _save(checkpoint: CheckpointId, events: Sequence[HistoryEvent]) -> SaveRecord:
    saved, staged, persisted = (
        [event for event in events if event.kind == kind] for kind in ("saved", "staged", "persisted")
    )
    num_bytes = sum(_bytes_of_ranks(events).values())
    first = saved or staged or persisted  # the time of the call is in the first of its events
    began = min(one.unix_s - (one.seconds if first else 0.0) for one in first or events)
    tiers = {event.tier for event in events if event.kind in ("persisted", "committed", "drained")}
    copies = tuple(
        _copy(tier, [event for event in events if event.tier == tier], began, num_bytes)
        for tier in sorted(tiers, key=lambda tier: (TIERS.index(tier) if tier in TIERS else len(TIERS), tier))
    )
    ended = [event for event in events if event.kind in _ENDED]
    is_durable = any(copy.durable_unix_s is not None for copy in copies)
    return SaveRecord(
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        num_ranks=len({event.rank for event in events}),
        num_bytes=num_bytes,
        started_unix_s=began,
        returned_unix_s=max((event.unix_s for event in saved), default=None),
        blocked_s=max((event.seconds for event in saved), default=None),
        staged_s=max((event.seconds for event in staged), default=None),
        outcome=DURABLE if is_durable else ended[0].kind if ended else UNFINISHED,
        detail="" if is_durable or not ended else ended[0].detail,
        copies=copies,
    )


def _bytes_of_ranks(events: Sequence[HistoryEvent]) -> dict[int, int]:
    found: dict[int, int] = {}
    for kind in (*_OWN, "drained"):
        for event in events:
            if event.kind == kind and event.num_bytes and not found.get(event.rank):
                found[event.rank] = event.num_bytes
        if kind == "persisted" and found:
            break  # later events may have the sum of all ranks
    return found


def _copy(tier: str, events: Sequence[HistoryEvent], began: float, num_bytes: int) -> Copy:
    drained = [event for event in events if event.kind == "drained"]
    written = drained or [event for event in events if event.kind == "persisted"]
    committed = [event.unix_s for event in events if event.kind == "committed"]
    # Rank 0 commits before the others notice; a drain is complete with its last rank.
    durable = min(committed) if committed else max((event.unix_s for event in drained), default=None)
    return Copy(
        tier,
        write_s=max((event.seconds for event in written), default=None),
        durable_unix_s=durable,
        durable_s=None if durable is None else max(0.0, durable - began),
        num_bytes=num_bytes,
        was_drained=bool(drained),
    )
