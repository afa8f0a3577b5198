"""The numbers of a demo's outcome: what saving cost, how fast the disk was, what each failure lost; pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from holdfast.cli.demo.story import Outcome


@dataclass(frozen=True, slots=True)
class Return:
    """One failure and the way back from it."""

    what: str
    at_step: int
    status: int
    restored: int
    steps_lost: int
    passed_over: bool
    restore_s: float  # to find, read, verify and fill
    back_s: float | None  # from the start of the process to the end of its first step


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over all saves of the survivor."""

    num_saves: int
    num_bytes: int  # of one checkpoint
    blocked_s: float  # what save() took from the loop
    optimizer_wait_s: float  # what the optimizer's next step() took more than others
    write_bps: float  # of the keepers, durable, hashing included
    raw_bps: float  # the same bytes, raw
    raw_is_direct: bool
    returns: tuple[Return, ...]

    @property
    def write_share(self) -> float:
        """The keepers' writing as a share of the raw writing."""
        return self.write_bps / self.raw_bps


def figures(outcome: Outcome) -> Figures:
    """All numbers.

    Raises:
        ValueError: nothing was saved.
    """
    persisted = [event for event in outcome.events if event["event"] == "persisted"]
    blocked = [event["seconds"] for event in outcome.events if event["event"] == "saved"]
    raw = outcome.raw_writes
    if not persisted or not blocked or not raw:
        message = "The survivor's history tells of no save."
        raise ValueError(message)
    return Figures(
        num_saves=sum(event["event"] == "committed" for event in outcome.events),
        num_bytes=max(event["bytes"] for event in persisted),
        blocked_s=statistics.median(blocked),
        optimizer_wait_s=_optimizer_wait_s(outcome),
        write_bps=statistics.median(event["bytes"] / event["seconds"] for event in persisted),
        raw_bps=statistics.median(one.num_bytes / one.seconds for one in raw),
        raw_is_direct=all(one.is_direct for one in raw),
        returns=tuple(_returns(outcome)),
    )


def _optimizer_wait_s(outcome: Outcome) -> float:
    after: list[float] = []
    others: list[float] = []
    for start in outcome.starts:
        for step, seconds in list(start.optimizer_s.items())[1:]:  # the first one makes its state
            (after if (step - 1) % outcome.every == 0 else others).append(seconds)
    return max(0.0, statistics.median(after) - statistics.median(others)) if after and others else 0.0


def _returns(outcome: Outcome) -> list[Return]:
    found = []
    for attempt, blow in enumerate(outcome.blows, start=2):
        event = outcome.restored(attempt)
        if event is None:
            continue
        found.append(
            Return(
                what=blow.what,
                at_step=blow.at_step,
                status=blow.status,
                restored=event["step"],
                steps_lost=blow.at_step - event["step"],
                passed_over="passed over" in event.get("detail", ""),
                restore_s=event["seconds"],
                back_s=outcome.starts[attempt - 1].first_step_s if attempt <= len(outcome.starts) else None,
            )
        )
    return found
