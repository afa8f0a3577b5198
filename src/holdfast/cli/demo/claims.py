"""Claims of the demo, each checked against the outcome, and the recoveries. Pure."""

from __future__ import annotations

import itertools
import signal
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


def find_recoveries(outcome: DemoOutcome) -> Iterator[Recovery]:
    """Yield the recovery from each failure whose next start has restored a checkpoint."""
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
