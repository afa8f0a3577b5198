"""Claims of the demo, each checked against the outcome, and its figures. Pure."""

from __future__ import annotations

import itertools
import signal
import statistics
from collections.abc import Iterator

from msgspec import Struct

from holdfast.cli.demo.scenario import DemoOutcome
from holdfast.errors import PREEMPTED_STATUS


class Recovery(Struct, frozen=True):
    """Recovery from one failure."""

    what: str
    at_step: int
    status: int
    restored: int
    steps_lost: int
    passed_over: bool
    restore_s: float  # to find, read, verify and load the checkpoint
    back_s: float | None  # from the start of the process to the end of its first step


class Figures(Struct, frozen=True):
    """Figures of one demo: medians over all saves of the survivor."""

    num_saves: int
    num_bytes: int  # of one checkpoint
    blocked_s: float  # duration of save()
    optimizer_wait_s: float  # extra duration of the next optimizer.step()
    write_bps: float  # by the keepers, durable and hashed
    raw_bps: float  # raw writes of the same size
    raw_is_direct: bool
    recoveries: tuple[Recovery, ...]
    write_share: float  # write speed of the keepers as a share of the raw write speed


def compute_figures(outcome: DemoOutcome) -> Figures:
    """Compute the figures of a demo."""
    persisted = [event for event in outcome.events if event["event"] == "persisted"]
    blocked = [event["seconds"] for event in outcome.events if event["event"] == "saved"]
    raw = outcome.raw_writes
    if not persisted or not blocked or not raw:
        raise ValueError("The history of the survivor has no save.")
    write_bps = statistics.median(event["bytes"] / event["seconds"] for event in persisted)
    raw_bps = statistics.median(write.num_bytes / write.seconds for write in raw)
    return Figures(
        num_saves=sum(event["event"] == "committed" for event in outcome.events),
        num_bytes=max(event["bytes"] for event in persisted),
        blocked_s=statistics.median(blocked),
        optimizer_wait_s=_optimizer_wait_s(outcome),
        write_bps=write_bps,
        raw_bps=raw_bps,
        raw_is_direct=all(write.is_direct for write in raw),
        write_share=write_bps / raw_bps,
        recoveries=tuple(_recoveries(outcome)),
    )


def _optimizer_wait_s(outcome: DemoOutcome) -> float:
    after: list[float] = []
    others: list[float] = []
    for start in outcome.starts:
        for step, seconds in list(start.optimizer_s.items())[1:]:  # the first step creates the state
            (after if (step - 1) % outcome.every == 0 else others).append(seconds)
    return max(0.0, statistics.median(after) - statistics.median(others)) if after and others else 0.0


def _recoveries(outcome: DemoOutcome) -> Iterator[Recovery]:
    for attempt, (failed, start) in enumerate(itertools.pairwise(outcome.starts), start=2):
        if (event := outcome.restored(attempt)) and failed.status is not None:
            yield Recovery(
                what=failed.failure,
                at_step=failed.step,
                status=failed.status,
                restored=event["step"],
                steps_lost=failed.step - event["step"],
                passed_over="skipped step" in event.get("detail", ""),
                restore_s=event["seconds"],
                back_s=start.first_step_s,
            )


class DemoClaim(Struct, frozen=True):
    """One claim, whether it holds, and the evidence."""

    text: str
    holds: bool
    evidence: str


def check_claims(outcome: DemoOutcome) -> list[DemoClaim]:
    """Check every claim of the demo."""
    killed, again, preempted, ending = outcome.starts
    began, after_damage, last = (outcome.restored(attempt).get("step") for attempt in (2, 3, 4))
    return [
        DemoClaim(
            "killed with SIGKILL while a save was being written",
            killed.status == -signal.SIGKILL and killed.saving is not None,
            f"exit status {killed.status}; step {killed.saving} had no manifest when the signal was sent",
        ),
        DemoClaim(
            "that save was not lost: its keeper finished it",
            killed.saving is not None and began == killed.saving,
            f"attempt 2 restored step {began}",
        ),
        DemoClaim(
            "killed with SIGKILL again, between two saves",
            again.status == -signal.SIGKILL
            and began is not None
            and again.step > outcome.damage.step > began,
            f"exit status {again.status} after step {again.step}",
        ),
        _damage_passed_over(outcome, after_damage),
        DemoClaim(
            "preempted with SIGTERM while saving: it saved, and ended with the status for a restart",
            preempted.status == PREEMPTED_STATUS and preempted.saving is not None and last == preempted.step,
            f"exit status {preempted.status} after step {preempted.step}; attempt 4 restored step {last}",
        ),
        DemoClaim(
            "finished, and wrote its done marker",
            ending.status == 0 and ending.step == outcome.steps == outcome.done_step,
            f"exit status {ending.status} after step {ending.step}; done marker of step {outcome.done_step}",
        ),
        DemoClaim(
            "its last checkpoint verifies",
            outcome.problems == [],
            "the checkpoint is missing"
            if outcome.problems is None
            else "; ".join(outcome.problems) or "every byte was hashed again",
        ),
        _equal(outcome),
    ]


def _damage_passed_over(outcome: DemoOutcome, found: int | None) -> DemoClaim:
    damage, event = outcome.damage, outcome.restored(3)
    message = f"skipped step {damage.step} of attempt {damage.attempt}"
    in_history = message in event.get("detail", "")
    on_stderr = any(message in line for line in outcome.starts[2].output)
    older = found is not None and found < damage.step
    return DemoClaim(
        "a flipped byte in the newest checkpoint was found and reported, and the one before restored",
        damage.after != damage.before and in_history and on_stderr and older,
        f"byte {damage.offset:,} of {damage.name}: {damage.before} became {damage.after}; "
        f"attempt 3 restored step {found}",
    )


def _equal(outcome: DemoOutcome) -> DemoClaim:
    reference, survivor = outcome.reference, outcome.starts[-1]
    is_whole = reference.status == 0 and reference.step == survivor.step == outcome.steps
    is_equal = reference.sha256 == survivor.sha256
    return DemoClaim(
        "weights and optimizer state equal those of the uninterrupted run, bit for bit",
        is_whole and is_equal and reference.sha256 is not None,
        f"sha256 {reference.sha256}" + (" of both" if is_equal else f"; the survivor's {survivor.sha256}"),
    )
