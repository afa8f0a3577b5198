"""Reports of a keeper: each outcome is recorded in the history, and sent to the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.retain import Deleted
from holdfast.checkpoint.keeper import messages
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.errors import Conflict, Denied, HoldfastError, Internal, RetryLater
from holdfast.system.environment import JobReport, report_to_job

TRANSIENT_ERRORS = (Denied, RetryLater)
"""Errors of a store that another call may not raise. Nothing is given up after a single one."""
_DELAYED = "Home cannot be reached. Training continues, and the upload is retried: "
_NO_METRICS = "The last metrics of a checkpoint were not sent home: "
_NOT_DELETED = "Old checkpoints could not be deleted: "
_NOT_RECORDED = "The history of the run could not be written: "


class Reports:
    """Sender of a keeper's reports. Threads may share it."""

    def __init__(self, history: History, inbox: TrainerInbox, tier: str, home: str) -> None:
        self.history, self._inbox = history, inbox
        self.tier = tier  # that saves are committed in first
        self._home = home  # as the job knows it

    # -- saves -----------------------------------------------------------------------------------------------

    def persisted(self, step: int, *, num_bytes: int, seconds: float) -> None:
        """Report that this rank's files of a save are durable."""
        reply = messages.SavePersisted(step)
        self._report("persisted", step, reply, num_bytes=num_bytes, seconds=seconds)

    def committed(self, step: int, *, num_bytes: int, seconds: float) -> None:
        """Report that a save is committed."""
        self._report_to_job(step)
        self._report("committed", step, messages.SaveDurable(step), num_bytes=num_bytes, seconds=seconds)

    def durable(self, step: int) -> None:
        """Report that a node-local save is durable. Its commit is recorded later."""
        self._report_to_job(step)
        self._inbox.reply(messages.SaveDurable(step))

    def _report_to_job(self, step: int) -> None:
        """Report a checkpoint to the job, if any. The trainer may be dead by now."""
        if self.history.writer.rank == 0:
            report_to_job(JobReport(home=self._home, step=step))

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

    # -- home ------------------------------------------------------------------------------------------------

    def arrived_home(self, checkpoint: CheckpointId, *, num_bytes: int, seconds: float) -> None:
        """Report that a checkpoint is complete in home."""
        step, is_own = checkpoint.step, checkpoint.attempt == self.history.writer.attempt
        detail = "" if is_own else f"attempt {checkpoint.attempt}"
        facts = {"num_bytes": num_bytes, "seconds": seconds, "detail": detail, "tier": "home"}
        self._report("drained", step, messages.ArrivedHome(step), **facts)

    def drain_delayed(self, step: int, error: HoldfastError) -> None:
        """Report that a checkpoint could not be sent home yet."""
        self._warn("drain-failed", step, _DELAYED, error, "home")

    def metrics_lost(self, step: int, error: HoldfastError) -> None:
        """Report that the last metrics of a checkpoint are not in home."""
        self._warn("drain-failed", step, _NO_METRICS, error, "home")

    # -- retention -------------------------------------------------------------------------------------------

    def deleted(self, checkpoint: Deleted, tier: str) -> None:
        """Record that retention has deleted a checkpoint."""
        state = "complete" if checkpoint.was_complete else "half done"
        detail = f"attempt {checkpoint.attempt}, {state}"
        self.history.record("retained", step=checkpoint.step, detail=detail, tier=tier)

    @contextlib.contextmanager
    def retention_errors(self, step: int, tier: str) -> Iterator[None]:
        """Report errors of retention. The next one deletes what is left."""
        try:
            with bugs_as_errors(f"Step {step}"):
                yield
        except HoldfastError as error:
            self._warn("retain-failed", step, _NOT_DELETED, error, tier)

    # -- the trainer's events --------------------------------------------------------------------------------

    def record(self, event: messages.RecordEvent) -> None:
        """Record an event of the trainer."""
        self.history.record(**asdict(event))

    def _warn(self, event: str, step: int, problem: str, error: HoldfastError, tier: str) -> None:
        self._report(event, step, _warning(problem, str(error)), detail=str(error), tier=tier)

    def _report(self, event: str, step: int, reply: messages.KeeperMessage, **facts: Any) -> None:
        self.history.record(event, step=step, **{"tier": self.tier, **facts})
        trouble, self.history.trouble = self.history.trouble, None
        if trouble is not None:
            self._inbox.reply(_warning(_NOT_RECORDED, trouble))
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
