"""The life of each attempt, as far as it has left traces: from its claim to its trainer's last sign; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from holdfast.format import run
from holdfast.report.events import METRICS, Event

_TRAINERS = ("restored", "saved", "staged", "skipped", "dropped", "ended", METRICS)
"""Events of which the trainer's own process tells; the keeper's go on after its death."""


@dataclass(frozen=True, slots=True)
class Life:
    """One attempt. Its trainer's end is not told when it is killed: `last_seen` is the last it said."""

    number: int
    began_unix_s: float  # its claim, or the save() that made it
    going_unix_s: float  # it had restored, or began from nothing: training goes from here
    last_seen_unix_s: float
    restored_step: int | None  # None: it began from nothing
    restore_s: float  # to find, read, verify and fill, in the slowest rank
    restored_bytes: int  # that all ranks read
    last_step: int  # the last step that it told of
    has_trained: bool  # False: it claimed its number, and told of nothing more
    host: str | None
    pid: int | None
    num_ranks: int | None
    end: str | None = None  # how it ended, if it could tell
    tear_check: str = ""  # by which means torn copies were found; where ranks differ, of the lowest
    remark: str = ""  # what its restore had to say: what it passed over, and why


def lives_of(events: Iterable[Event], claims: Mapping[int, run.Attempt]) -> list[Life]:
    """The life of every attempt that was claimed or told of, by number; an import is none.

    Args:
        events: of the whole run.
        claims: by attempt number; those that could be read.
    """
    told: dict[int, list[Event]] = {number: [] for number in claims}
    for event in events:
        if event.attempt > 0:
            told.setdefault(event.attempt, []).append(event)
    return [
        _life(number, told[number], claims.get(number))
        for number in sorted(told)
        if not any(
            event.kind == "committed" and event.detail.startswith("imported") for event in told[number]
        )
    ]


def _without_source(event: Event) -> Event:
    """The event of a restore, without the attempt that it was from, which its detail names first."""
    return replace(event, detail=re.sub(r"^attempt \d+(; )?", "", event.detail))


def _life(number: int, told: list[Event], claim: run.Attempt | None) -> Life:
    # Savers without a keeper tell no more than that they wrote; an import tells only of a commit.
    trainers = [event for event in told if event.kind in _TRAINERS] or [
        event for event in told if event.kind == "persisted"
    ]
    restored = [event for event in trainers if event.kind == "restored"]
    ended = [event for event in trainers if event.kind == "ended"]
    # A first save() that no restore came before makes the claim itself.
    starts = [event.unix_s - event.seconds for event in trainers or ([] if claim else told)]
    if claim:
        starts.append(claim.started_unix_s)
    began = min(starts)
    going = max((event.unix_s for event in restored), default=began)
    last_seen = max((event.unix_s for event in trainers), default=going)
    return Life(
        number,
        began,
        going_unix_s=max(began, going),
        last_seen_unix_s=max(began, going, last_seen),
        restored_step=restored[0].step if restored else None,
        restore_s=max((event.seconds for event in restored), default=0.0),
        restored_bytes=sum(event.num_bytes for event in restored),
        last_step=max((event.step or 0 for event in trainers), default=0),
        has_trained=bool(trainers),
        host=claim.host if claim else None,
        pid=claim.pid if claim else None,
        num_ranks=claim.world_size if claim else len({event.rank for event in trainers}) or None,
        end=(ended[0].detail or "ended") if ended else None,
        tear_check=next((event.detail for event in told if event.kind == "tear-check"), ""),
        remark=next((event.detail for event in map(_without_source, restored) if event.detail), ""),
    )
