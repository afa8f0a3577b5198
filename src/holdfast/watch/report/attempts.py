"""Attempts of a run: the time from the claim of each to its trainer's last event; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from holdfast.checkpoint.format import run
from holdfast.watch.report.events import METRICS, HistoryEvent

_TRAINERS = ("restored", "saved", "staged", "skipped", "dropped", "ended", "killed", METRICS)
"""Events of the trainer's own process. The keeper's continue after its death, but for "killed"."""


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """One attempt. A killed trainer records no end: `last_seen_unix_s` is its last event."""

    number: int
    started_unix_s: float  # its claim, or the save() that made it
    training_unix_s: float  # start of training, after the restore
    last_seen_unix_s: float
    restored_step: int | None  # None: started from scratch
    restore_s: float  # duration of the restore on the slowest rank
    last_step: int  # last recorded step
    has_trained: bool  # False: no event besides its claim
    host: str | None
    pid: int | None
    num_ranks: int | None
    end: str | None = None  # reason of its end, if recorded
    has_last_step: bool = False  # `last_step` is its newest completed step, not only the last recorded one
    tear_check: str = ""  # method of finding torn copies, from the lowest rank
    remark: str = ""  # of its restore: skipped checkpoints and reasons


def attempt_spans(
    events: Iterable[HistoryEvent], claims: Mapping[int, run.AttemptClaim]
) -> list[AttemptSpan]:
    """Return every attempt with a claim or an event, by number, except imports.

    Args:
        claims: readable claims by attempt number.
    """
    by_attempt: dict[int, list[HistoryEvent]] = {number: [] for number in claims}
    for event in events:
        if event.attempt > 0:
            by_attempt.setdefault(event.attempt, []).append(event)
    return [
        _attempt_span(number, by_attempt[number], claims.get(number))
        for number in sorted(by_attempt)
        if not any(
            event.kind == "committed" and event.detail.startswith("imported") for event in by_attempt[number]
        )
    ]


def _without_source(event: HistoryEvent) -> HistoryEvent:
    """Return a restore's event without the source attempt at the start of its detail."""
    return replace(event, detail=re.sub(r"^attempt \d+(; )?", "", event.detail))


def _attempt_span(number: int, events: list[HistoryEvent], claim: run.AttemptClaim | None) -> AttemptSpan:
    # Without a keeper, a save has only the event "persisted"; an import has only a commit.
    trainers = [event for event in events if event.kind in _TRAINERS] or [
        event for event in events if event.kind == "persisted"
    ]
    restored = [event for event in trainers if event.kind == "restored"]
    ended = [event for event in trainers if event.kind == "ended"]
    # Without a restore, the first save() makes the claim.
    starts = [event.unix_s - event.seconds for event in trainers or ([] if claim else events)]
    if claim:
        starts.append(claim.started_unix_s)
    began = min(starts)
    going = max((event.unix_s for event in restored), default=began)
    last_seen = max((event.unix_s for event in trainers), default=going)
    return AttemptSpan(
        number,
        began,
        training_unix_s=max(began, going),
        last_seen_unix_s=max(began, going, last_seen),
        restored_step=restored[0].step if restored else None,
        restore_s=max((event.seconds for event in restored), default=0.0),
        last_step=max((event.step or 0 for event in trainers), default=0),
        has_trained=bool(trainers),
        host=claim.host if claim else None,
        pid=claim.pid if claim else None,
        num_ranks=claim.world_size if claim else len({event.rank for event in trainers}) or None,
        end=(ended[0].detail or "ended") if ended else None,
        has_last_step=bool(ended) or any(event.kind == "killed" for event in trainers),
        tear_check=next((event.detail for event in events if event.kind == "tear-check"), ""),
        remark=next((event.detail for event in map(_without_source, restored) if event.detail), ""),
    )
