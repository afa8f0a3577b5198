"""Figures of the demo: the cost of saving, the speed of the disk, the loss in each failure. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from holdfast.cli.demo.scenario import DemoOutcome


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery from one failure."""

    what: str
    at_step: int
    status: int
    restored: int
    steps_lost: int
    passed_over: bool
    restore_s: float  # to find, read, verify and load the checkpoint
    back_s: float | None  # from the start of the process to the end of its first step


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one demo: medians over all saves of the survivor."""

    num_saves: int
    num_bytes: int  # of one checkpoint
    blocked_s: float  # duration of save()
    optimizer_wait_s: float  # extra duration of the next optimizer.step()
    write_bps: float  # by the keepers, durable and hashed
    raw_bps: float  # raw writes of the same size
    raw_is_direct: bool
    recoveries: tuple[Recovery, ...]

    @property
    def write_share(self) -> float:
        """Write speed of the keepers as a share of the raw write speed."""
        return self.write_bps / self.raw_bps


def compute_figures(outcome: DemoOutcome) -> Figures:
    """Compute the figures of a demo.

    Raises:
        ValueError: the history has no save.
    """
    persisted = [event for event in outcome.events if event["event"] == "persisted"]
    blocked = [event["seconds"] for event in outcome.events if event["event"] == "saved"]
    raw = outcome.raw_writes
    if not persisted or not blocked or not raw:
        raise ValueError("The history of the survivor has no save.")
    return Figures(
        num_saves=sum(event["event"] == "committed" for event in outcome.events),
        num_bytes=max(event["bytes"] for event in persisted),
        blocked_s=statistics.median(blocked),
        optimizer_wait_s=_optimizer_wait_s(outcome),
        write_bps=statistics.median(event["bytes"] / event["seconds"] for event in persisted),
        raw_bps=statistics.median(one.num_bytes / one.seconds for one in raw),
        raw_is_direct=all(one.is_direct for one in raw),
        recoveries=tuple(_recoveries(outcome)),
    )


def _optimizer_wait_s(outcome: DemoOutcome) -> float:
    after: list[float] = []
    others: list[float] = []
    for start in outcome.starts:
        for step, seconds in list(start.optimizer_s.items())[1:]:  # the first step creates the state
            (after if (step - 1) % outcome.every == 0 else others).append(seconds)
    return max(0.0, statistics.median(after) - statistics.median(others)) if after and others else 0.0


def _recoveries(outcome: DemoOutcome) -> list[Recovery]:
    found = []
    for attempt, failure in enumerate(outcome.failures, start=2):
        event = outcome.restored(attempt)
        if event is None:
            continue
        found.append(
            Recovery(
                what=failure.what,
                at_step=failure.at_step,
                status=failure.status,
                restored=event["step"],
                steps_lost=failure.at_step - event["step"],
                passed_over="skipped step" in event.get("detail", ""),
                restore_s=event["seconds"],
                back_s=outcome.starts[attempt - 1].first_step_s if attempt <= len(outcome.starts) else None,
            )
        )
    return found
