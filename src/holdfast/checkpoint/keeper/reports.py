"""Reports of a keeper: each outcome is recorded in the history, and sent to the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.retain import Deleted
from holdfast.checkpoint.keeper import messages
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.errors import Conflict, Denied, HoldfastError, Internal, RetryLater
from holdfast.system.environment import JobReport, report_to_job

TRANSIENT_ERRORS = (Denied, RetryLater)
"""Errors of a store that another call may not raise. Nothing is given up after a single one."""

Problem: TypeAlias = Literal["drain-delayed", "metrics-lost", "not-deleted"]
_EVENTS: dict[messages.Stage, str] = {"persisted": "persisted", "durable": "committed", "in home": "drained"}
_PROBLEMS: dict[Problem, tuple[str, str]] = {  # event of the history, and text for the trainer
    "drain-delayed": (
        "drain-failed",
        "Home cannot be reached. Training continues, and the upload is retried: ",
    ),
    "metrics-lost": ("drain-failed", "The last metrics of a checkpoint were not sent home: "),
    "not-deleted": ("retain-failed", "Old checkpoints could not be deleted: "),
}


class Reports:
    """Sender of a keeper's reports. Threads may share it."""

    def __init__(self, history: History, inbox: TrainerInbox, tier: str, home: str) -> None:
        self.history, self._inbox = history, inbox
        self.tier = tier  # that saves are committed in first
        self._home = home  # as the job knows it

    def reached(self, step: int, stage: messages.Stage, **facts: Any) -> None:
        """Report that a save has reached a stage; without facts, nothing is recorded yet."""
        if stage == "durable" and self.history.writer.rank == 0:
            # To the job, if any: the trainer may be dead by now.
            report_to_job(JobReport(home=self._home, step=step))
        reply = messages.SaveReached(step, stage)
        if facts:
            self._report(_EVENTS[stage], step, reply, **facts)
        else:
            self._inbox.reply(reply)

    def failed(self, step: int, error: HoldfastError, *, in_home: bool = False) -> None:
        """Report that a save has failed, or will not be sent home, or that a newer attempt has fenced it."""
        detail = str(error)
        reply = messages.SaveFailed(
            step, type(error).__name__, detail[: messages.MAX_DETAIL], in_home=in_home
        )
        if in_home:
            self._report("drain-failed", step, reply, detail=detail, tier="home")
        else:
            self._report("fenced" if isinstance(error, Conflict) else "failed", step, reply, detail=detail)

    def warn(self, problem: Problem, step: int, error: HoldfastError, *, tier: str = "home") -> None:
        """Report a problem in a tier that training continues with."""
        event, text = _PROBLEMS[problem]
        self._report(event, step, _warning(text, str(error)), detail=str(error), tier=tier)

    def deleted(self, checkpoint: Deleted, tier: str) -> None:
        """Record that retention has deleted a checkpoint."""
        state = "complete" if checkpoint.was_complete else "half done"
        detail = f"attempt {checkpoint.attempt}, {state}"
        self.history.record("retained", step=checkpoint.step, detail=detail, tier=tier)

    def _report(self, event: str, step: int, reply: messages.KeeperMessage, **facts: Any) -> None:
        self.history.record(event, step=step, **{"tier": self.tier, **facts})
        trouble, self.history.trouble = self.history.trouble, None
        if trouble is not None:
            self._inbox.reply(_warning("The history of the run could not be written: ", trouble))
        self._inbox.reply(reply)


def _warning(problem: str, reason: str) -> messages.WarnOf:
    return messages.WarnOf(problem + reason[: messages.MAX_DETAIL])


@contextlib.contextmanager
def bugs_as_errors(what: str) -> Iterator[None]:
    """Raise a bug as the error of one save: if the keeper died, all other saves would fail with it."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise Internal(f"{what} failed because of a bug in Holdfast: {error!r}.") from error
