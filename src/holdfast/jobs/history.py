"""History of a job: its changes of status with all details, and the attempts and durations they make up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from holdfast.jobs import journal
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.outcome import Outcome
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus

_RUNS = frozenset({JobStatus.RUNNING, JobStatus.WINDING_DOWN, JobStatus.CANCELLING})


class Change(Struct, frozen=True):
    """Change of a job's status, attempt or reason."""

    unix_s: float
    status: JobStatus
    attempt: int
    is_active: bool  # processes of the attempt may exist
    reason: str = ""
    outcomes: Mapping[int, Outcome] = {}  # so far in the attempt, by node
    machines: tuple[str, ...] = ()
    step: int | None = None  # newest checkpoint that the job has reported
    saved_unix_s: float | None = None  # time of that report


class JobAttempt(Struct, frozen=True):
    """Attempt of a job.

    Attributes:
        number: counted from 1.
        started_unix_s: start of its nodes.
        running_unix_s: start of `run` on all nodes; None if it was never reached.
        ended_unix_s: end of its last process; None while it is running.
        status: status of the job after it, or now.
        reason: why it ended.
        outcomes: outcomes of its nodes.
        machines: names of its machines, for engines with several.
        step: newest checkpoint at its end.
        lost_s: time from the newest checkpoint, or the start of `run`, to its end, which the next attempt
            repeats. 0 if it completed the job or is running.
    """

    number: int
    started_unix_s: float
    running_unix_s: float | None
    ended_unix_s: float | None
    status: JobStatus
    reason: str
    outcomes: Mapping[int, Outcome]
    machines: tuple[str, ...]
    step: int | None
    lost_s: float

    def exit_of(self, rank: int) -> str:
        """Return the exit status of a node: a number, a signal, `lost`, or nothing yet."""
        outcome = self.outcomes.get(rank)
        if outcome is None or outcome.is_lost:
            return "" if self.ended_unix_s is None else "lost"
        return f"signal {outcome.killed_by}" if outcome.killed_by is not None else str(outcome.code)


class Durations(Struct, frozen=True):
    """Durations of a job in seconds.

    Attributes:
        total_s: from its submission to its end or now.
        running_s: with `run` started on all nodes.
        down_s: between the end of an attempt and the start of `run` in the next.
    """

    total_s: float
    running_s: float
    down_s: float


def add_change(folder: JobFolder, job_state: JobState, machines: tuple[str, ...], step: int | None) -> None:
    """Append a change to the history of a job."""
    try:
        saved_unix_s = folder.progress.stat().st_mtime if step is not None else None
    except FileNotFoundError:
        saved_unix_s = None
    same = ("status", "attempt", "is_active", "reason", "outcomes")
    of_state = {name: getattr(job_state, name) for name in same}
    change = Change(time.time(), **of_state, machines=machines, step=step, saved_unix_s=saved_unix_s)
    journal.append_value(folder.history, change, is_durable=False)


def read_changes(folder: JobFolder) -> list[Change]:
    """Return the changes of a job, oldest first. Damaged ones are left out."""
    return journal.read_values(folder.history, Change)


def list_attempts(changes: Sequence[Change]) -> list[JobAttempt]:
    """Return the attempts that changes make up; pure."""
    by_number: dict[int, list[Change]] = {}
    for change in changes:
        if change.attempt:
            by_number.setdefault(change.attempt, []).append(change)
    return [_attempt(number, of_one) for number, of_one in sorted(by_number.items())]


def measure(changes: Sequence[Change], *, submitted_unix_s: float, until_unix_s: float) -> Durations:
    """Return the durations that changes make up; pure."""
    running_s = down_s = 0.0
    ends = [*(change.unix_s for change in changes[1:]), until_unix_s]
    for change, end_s in zip(changes, ends, strict=False):
        passed_s = max(0.0, end_s - change.unix_s)
        if change.status in _RUNS:
            running_s += passed_s
        elif change.status is JobStatus.RECOVERING:
            down_s += passed_s
    return Durations(max(0.0, until_unix_s - submitted_unix_s), running_s, down_s)


def _attempt(number: int, changes: Sequence[Change]) -> JobAttempt:
    first = changes[0]
    running = next((one for one in changes if one.status in _RUNS and one.is_active), None)
    ended = next((one for one in changes[1:] if not one.is_active or one.status.is_final), None)
    last = ended or changes[-1]
    lost_s = 0.0
    if running is not None and ended is not None and ended.status is not JobStatus.SUCCEEDED:
        lost_s = max(0.0, ended.unix_s - max(running.unix_s, ended.saved_unix_s or 0.0))
    same = ("status", "reason", "outcomes", "machines", "step")
    return JobAttempt(
        number=number,
        started_unix_s=first.unix_s,
        running_unix_s=None if running is None else running.unix_s,
        ended_unix_s=None if ended is None else ended.unix_s,
        **{name: getattr(last, name) for name in same},
        lost_s=lost_s,
    )
