"""Claims of the demo, each checked against the outcome. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from holdfast.cli.demo.scenario import DemoOutcome
from holdfast.errors import PREEMPTED_STATUS


@dataclass(frozen=True, slots=True)
class DemoClaim:
    """One claim, whether it holds, and the evidence."""

    text: str
    holds: bool
    evidence: str


def check_claims(outcome: DemoOutcome) -> list[DemoClaim]:
    """Check every claim of the demo."""
    return [
        _killed_while_saving(outcome),
        _staged_save_survived(outcome),
        _killed_between_saves(outcome),
        _damage_passed_over(outcome),
        _preempted(outcome),
        _finished(outcome),
        _last_verifies(outcome),
        _equal(outcome),
    ]


def restored_step(outcome: DemoOutcome, attempt: int) -> int | None:
    """Return the step that an attempt restored, or None if its history has no restore."""
    event = outcome.restored(attempt)
    return None if event is None else event["step"]


def _killed_while_saving(outcome: DemoOutcome) -> DemoClaim:
    failure = outcome.failures[0]
    return DemoClaim(
        "killed with SIGKILL while a save was being written",
        failure.status == -signal.SIGKILL and failure.saving is not None,
        f"exit status {failure.status}; step {failure.saving} had no manifest when the signal was sent",
    )


def _staged_save_survived(outcome: DemoOutcome) -> DemoClaim:
    saving, found = outcome.failures[0].saving, restored_step(outcome, 2)
    return DemoClaim(
        "that save was not lost: its keeper finished it",
        saving is not None and found == saving,
        f"attempt 2 restored step {found}",
    )


def _killed_between_saves(outcome: DemoOutcome) -> DemoClaim:
    failure, began = outcome.failures[1], restored_step(outcome, 2)
    return DemoClaim(
        "killed with SIGKILL again, between two saves",
        failure.status == -signal.SIGKILL
        and began is not None
        and failure.at_step > outcome.damage.step > began,
        f"exit status {failure.status} after step {failure.at_step}",
    )


def _damage_passed_over(outcome: DemoOutcome) -> DemoClaim:
    damage, event, found = outcome.damage, outcome.restored(3), restored_step(outcome, 3)
    message = f"skipped step {damage.step} of attempt {damage.attempt}"
    in_history = event is not None and message in event.get("detail", "")
    on_stderr = (
        any(message in line for line in outcome.starts[2].output) if len(outcome.starts) > 2 else False
    )
    older = found is not None and found < damage.step
    return DemoClaim(
        "a flipped byte in the newest checkpoint was found and reported, and the one before restored",
        damage.after != damage.before and in_history and on_stderr and older,
        f"byte {damage.offset:,} of {damage.name}: {damage.before} became {damage.after}; "
        f"attempt 3 restored step {found}",
    )


def _preempted(outcome: DemoOutcome) -> DemoClaim:
    failure, found = outcome.failures[2], restored_step(outcome, 4)
    right_status = failure.status == PREEMPTED_STATUS and failure.saving is not None
    return DemoClaim(
        "preempted with SIGTERM while saving: it saved, and ended with the status for a restart",
        right_status and found == failure.at_step,
        f"exit status {failure.status} after step {failure.at_step}; attempt 4 restored step {found}",
    )


def _finished(outcome: DemoOutcome) -> DemoClaim:
    ending = outcome.survivor
    return DemoClaim(
        "finished, and wrote its done marker",
        ending.status == 0 and ending.step == outcome.steps == outcome.done_step,
        f"exit status {ending.status} after step {ending.step}; done marker of step {outcome.done_step}",
    )


def _last_verifies(outcome: DemoOutcome) -> DemoClaim:
    evidence = (
        "the checkpoint is missing"
        if outcome.problems is None
        else "; ".join(outcome.problems) or "every byte was hashed again"
    )
    return DemoClaim("its last checkpoint verifies", outcome.problems == (), evidence)


def _equal(outcome: DemoOutcome) -> DemoClaim:
    one, other = outcome.reference, outcome.survivor
    whole = one.status == 0 and one.step == other.step == outcome.steps
    return DemoClaim(
        "weights and optimizer state equal those of the uninterrupted run, bit for bit",
        whole and one.sha256 is not None and one.sha256 == other.sha256,
        f"sha256 {one.sha256}"
        + (" of both" if one.sha256 == other.sha256 else f"; the survivor's {other.sha256}"),
    )
