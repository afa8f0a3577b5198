"""Outbox of a job: its notifications, the results of sending them, and their targets."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from holdfast.errors import printable, redact
from holdfast.jobs import journal
from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.record_files import Submission
from holdfast.jobs.state_machine import JobState, exit_status
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.subscription import Subscription
from holdfast.system.environment import NOTIFY, NOTIFY_ON
from holdfast.system.units import plural

_T = TypeVar("_T")
_MAX_BYTES = 16 << 20
_MAX_REASON = 1000
_NOT_PASSED_ON = frozenset({NOTIFY, NOTIFY_ON, TAG, "HOLDFAST_PROGRESS"})
"""Variables of the launch that are not for its commands: the targets, and those of an outer job."""


@dataclass(frozen=True, slots=True)
class NotificationPlan:
    """Targets of a job and their environment, with secrets. Removed once the last notification was sent."""

    job: int
    name: str
    engine: str
    task_id: str
    targets: tuple[str, ...]
    statuses: frozenset[JobStatus]
    environment: dict[str, str] = field(default_factory=dict)  # of the user who launched the job
    directory: str = "/"  # current one of the launch


@dataclass(frozen=True, slots=True)
class Notification:
    """New status of a job, to be sent."""

    id: str  # the same if it is recorded again after a kill
    status: JobStatus
    attempt: int
    recoveries: int
    reason: str
    exit_status: int | None  # once the job has ended
    step: int | None  # newest checkpoint that the job has reported
    unix_s: float
    is_wanted: bool  # False: only marks the end of the job
    failed_saves: int = 0  # that the job has reported


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of sending a notification to one target.

    Attributes:
        notification: id of the notification.
        status: status of the job.
        target: "command" or "webhook", and its position.
        error: why it was not sent; empty if it was.
        num_tries: number of times that it was tried.
        unix_s: time of the result.
    """

    notification: str
    status: JobStatus
    target: str
    error: str
    num_tries: int
    unix_s: float


def write_plan(folder: JobFolder, subscription: Subscription, submission: Submission) -> None:
    """Write the targets of a job, readable only by its owner. Without targets, write nothing."""
    if not subscription.targets:
        return
    plan = NotificationPlan(
        job=submission.number,
        name=submission.name,
        engine=submission.engine,
        task_id=submission.task_id,
        targets=subscription.targets,
        statuses=subscription.statuses,
        environment={name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON},
        directory=str(Path.cwd()),
    )
    journal.write_document(folder.notify_plan, plan)


def read_plan(folder: JobFolder) -> NotificationPlan | None:
    """Return the targets of a job, or None if they were removed or never chosen."""
    return journal.read_document(folder.notify_plan, NotificationPlan, max_bytes=_MAX_BYTES)


def add_notification(
    folder: JobFolder, job_state: JobState, *, step: int | None, failed_saves: int = 0
) -> None:
    """Record the present status of a job, unless it is recorded or not wanted.

    The end of a job is always recorded: then its targets are removed.

    Args:
        step: newest checkpoint that the job has reported.
        failed_saves: number of failed saves that it has reported.
    """
    plan = read_plan(folder)
    is_wanted = plan is not None and job_state.status in plan.statuses
    if plan is None or not (is_wanted or job_state.status.is_final):
        return
    # An attempt that recovers is that of the one before.
    is_next = job_state.status is JobStatus.RECOVERING and job_state.is_active
    attempt = job_state.attempt - is_next
    identity = "ENDED" if job_state.status.is_final else f"{job_state.status.value}-{attempt}"
    with journal.locked(folder.notifications) as fd:
        if any(one.id == identity for one in read_notifications(folder)):
            return
        reason = printable(redact(job_state.reason.partition("\n")[0]))[:_MAX_REASON]
        one = Notification(
            id=identity,
            status=job_state.status,
            attempt=attempt,
            recoveries=job_state.recoveries,
            reason=reason,
            exit_status=exit_status(job_state) if job_state.status.is_final else None,
            step=step,
            unix_s=time.time(),
            is_wanted=is_wanted,
            failed_saves=failed_saves,
        )
        journal.append(fd, journal.encode(one))


def read_notifications(folder: JobFolder) -> list[Notification]:
    """Return all notifications so far, oldest first."""
    return journal.read_values(folder.notifications, Notification)


def add_delivery(folder: JobFolder, delivery: Delivery) -> None:
    """Record a result durably."""
    journal.append_value(folder.deliveries, delivery)


def read_deliveries(folder: JobFolder) -> list[Delivery]:
    """Return all results so far, oldest first."""
    return journal.read_values(folder.deliveries, Delivery)


def facts_of(plan: NotificationPlan, one: Notification) -> dict[str, str | int | float | None]:
    """Return the JSON members of a notification."""
    reason = f": {one.reason}" if one.reason else ""
    failed = f"; {plural(one.failed_saves, 'save')} failed" if one.failed_saves else ""
    host = socket.gethostname()
    return {
        "text": f"job {plan.job} ({printable(plan.name)}) on {host} is {one.status.value}{reason}{failed}",
        "job": plan.job,
        "name": plan.name,
        "engine": plan.engine,
        "task_id": plan.task_id,
        "host": host,
        "status": one.status.value,
        "reason": one.reason,
        "attempt": one.attempt,
        "recoveries": one.recoveries,
        "exit_status": one.exit_status,
        "step": one.step,
        "failed_saves": one.failed_saves,
        "unix_s": one.unix_s,
    }


def variables_of(facts: dict[str, str | int | float | None]) -> dict[str, str]:
    """Return the environment variables of a notification."""
    names = {
        "job": "HOLDFAST_JOB",
        "name": "HOLDFAST_JOB_NAME",
        "engine": "HOLDFAST_JOB_ENGINE",
        "status": "HOLDFAST_JOB_STATUS",
        "reason": "HOLDFAST_JOB_REASON",
        "attempt": "HOLDFAST_ATTEMPT",
        "exit_status": "HOLDFAST_JOB_EXIT_STATUS",
        "step": "HOLDFAST_JOB_STEP",
        "text": "HOLDFAST_JOB_TEXT",
    }
    return {
        variable: "" if (value := facts[name]) is None else str(value) for name, variable in names.items()
    }
