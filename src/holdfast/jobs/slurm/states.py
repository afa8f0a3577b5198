"""State of a job, from its controller's record and Slurm's answer; pure."""

from __future__ import annotations

import dataclasses

from holdfast.jobs.slurm.commands import Queued
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus

_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
_THERE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
_SOON_AGAIN = frozenset({"PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
"""States after which Slurm requeues a job by itself."""


def current_state(
    life: JobState, queued: Queued | None, *, is_cancelled: bool, output: str, missing: str = ""
) -> JobState:
    """Return the current state of a job.

    Args:
        life: state recorded by the job's controller. A final state is returned unchanged.
        queued: Slurm's answer, or None if Slurm has forgotten the job.
        is_cancelled: True if a user has cancelled the job.
        output: file with more details, for messages.
        missing: files that are not in their buckets, as far as known.
    """
    if life.status.is_final:
        return life
    if queued is not None and queued.state in _WAITING | _SOON_AGAIN:
        return _waiting(life, queued, is_cancelled=is_cancelled)
    if queued is not None and queued.state in _THERE:
        status = JobStatus.STARTING if life.status is JobStatus.PENDING else life.status
        return dataclasses.replace(life, status=status)
    ended = _ended(life, queued, is_cancelled=is_cancelled, output=output)
    return dataclasses.replace(ended, reason="; ".join(filter(None, (ended.reason, missing))))


def _waiting(life: JobState, queued: Queued, *, is_cancelled: bool) -> JobState:
    if is_cancelled:
        return dataclasses.replace(life, status=JobStatus.CANCELLING, reason="cancelled")
    status = JobStatus.RECOVERING if life.attempt else JobStatus.PENDING
    why = f"waits in Slurm ({queued.reason})" if queued.reason not in ("", "None") else "waits in Slurm"
    before = f"{life.reason}; " if life.reason else ""
    return dataclasses.replace(life, status=status, reason=before + why)


def _ended(life: JobState, queued: Queued | None, *, is_cancelled: bool, output: str) -> JobState:
    """Return the state of a job that Slurm ended before its controller could record why."""
    state = "Slurm has forgotten the job" if queued is None else f"Slurm reports {queued.state}"
    if is_cancelled or (queued is not None and queued.state.startswith("CANCELLED")):
        reason = "cancelled" if is_cancelled else "cancelled in Slurm"
        return dataclasses.replace(life, status=JobStatus.CANCELLED, is_active=False, reason=reason)
    cause = (
        "the job's controller did not record how it ended"
        if life.attempt
        else "its nodes sent no message: is the folder on a file system that they share "
        "(HOLDFAST_STATE), and Python at the same path there?"
    )
    reason = f"{state}, and {cause} (see {output})"
    return dataclasses.replace(life, status=JobStatus.FAILED_CONTROLLER, is_active=False, reason=reason)
