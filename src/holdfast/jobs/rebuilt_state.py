"""State of a job on this machine, rebuilt from its folder without its journal."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from holdfast.errors import Corrupt, Internal
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node_spec import NodeSpec, read_outcome
from holdfast.jobs.outcome import Outcome
from holdfast.jobs.record_files import StoredState, Submission, read_requests
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import FINAL, JobStatus

_REASON = "the record of this job was lost, and rebuilt from its folder"
_CHANGE = re.compile(r"\S+ \S+ attempt \d+ ([A-Z_]+)(?: (.*))?")


def rebuild_state(folder: JobFolder, submission: Submission) -> StoredState:
    """Return the state of a job whose journal does not have it.

    The newest attempt may be running. A controller adopts its nodes, or finds how they ended. Restarts are
    counted from the recorded outcomes. Requests to preempt count as applied, and to cancel as open.
    """
    attempt = folder.last_attempt()
    plan = _newest_plan(folder, submission, attempt)
    if attempt == 1 and plan is None:
        attempt = 0  # killed before any node was started: the job has no process, and no claim
    preempted = tuple(one.id for one in read_requests(folder) if one.kind == "preempt")
    started_s = _modified_unix_s(folder.attempt(1)) if attempt else None
    life = JobState()
    ended_s: float | None = None
    if attempt:
        life = JobState(
            status=_status(folder, submission, attempt),
            attempt=attempt,
            is_active=True,
            recoveries=attempt - 1,
            num_errors=min(_num_errors(folder, submission, attempt), submission.policy.max_restarts),
            reason=_REASON,
        )
    if (final := _final_change(folder)) is not None:
        status, reason = final
        life = JobState(status=status, attempt=attempt, recoveries=max(0, attempt - 1), reason=reason)
        ended_s = _modified_unix_s(folder.changed)
    return StoredState(
        submission.submitted_unix_s,
        life,
        started_unix_s=started_s,
        ended_unix_s=ended_s,
        answered=preempted,
        gpus=() if plan is None else plan.gpus,
        port=None if plan is None else plan.port,
    )


def _status(folder: JobFolder, submission: Submission, attempt: int) -> JobStatus:
    """Return the status of a job that may be running, by its newest attempt."""
    if all(folder.node(attempt, rank).running.exists() for rank in range(submission.policy.num_nodes)):
        return JobStatus.RUNNING
    return JobStatus.STARTING if attempt == 1 else JobStatus.RECOVERING


def _num_errors(folder: JobFolder, submission: Submission, attempt: int) -> int:
    """Return the number of earlier attempts that ended by an error of the job."""
    policy = submission.policy
    return sum(
        any(
            outcome is not None and outcome.is_failed_command and outcome.code not in policy.free_codes
            for outcome in (_outcome(folder, number, rank) for rank in range(policy.num_nodes))
        )
        for number in range(1, attempt)
    )


def _newest_plan(folder: JobFolder, submission: Submission, attempt: int) -> NodeSpec | None:
    """Return the newest specification of a node. That of any node has the GPUs of all."""
    for number in range(attempt, 0, -1):
        for rank in range(submission.policy.num_nodes):
            with contextlib.suppress(FileNotFoundError, Corrupt):
                return NodeSpec.read(folder.node(number, rank).plan)
    return None


def _outcome(folder: JobFolder, attempt: int, rank: int) -> Outcome | None:
    try:
        return read_outcome(folder.node(attempt, rank).ended)
    except Internal:
        return None


def _final_change(folder: JobFolder) -> tuple[JobStatus, str] | None:
    """Return the final status and its reason from the log of changes, or None."""
    try:
        lines = folder.changed.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    found = _CHANGE.fullmatch(lines[-1]) if lines else None
    names = {status.value: status for status in FINAL}
    return (names[found[1]], found[2] or "") if found and found[1] in names else None


def _modified_unix_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
