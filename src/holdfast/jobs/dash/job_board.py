"""Board of all jobs, read once for all pages, and facts of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.description import JobDescription, describe_checks, describe_job
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.history import Change, JobAttempt, measure, read_changes
from holdfast.jobs.interface import queue
from holdfast.jobs.records import Records
from holdfast.watch.report.kept_readings import KeptReadings

_MIN_AGE_S = 1.0
_REST = 4.0
"""Pause between two readings, as a multiple of the time that one takes."""
MAX_ENDED = 200
"""Jobs of the list that have ended. `holdfast queue --all` has all."""


@dataclass(frozen=True, slots=True)
class JobListing:
    """All jobs at one moment.

    Attributes:
        jobs: those that have not ended first, newest first.
        problems: why some jobs are missing or out of date, a message for each reason.
    """

    jobs: tuple[Job, ...]
    problems: tuple[str, ...]

    def find(self, number: int) -> Job | None:
        """Return the job with a number, if any."""
        return next((job for job in self.jobs if job.id == number), None)


class JobBoard:
    """Board of all jobs. The longer reading takes, the less often they are read."""

    def __init__(self) -> None:
        self._readings = KeptReadings[JobListing](least_age_s=_MIN_AGE_S, rest=_REST)
        self._listing = JobListing((), ())
        self._by_engine: dict[str, list[Job]] = {}

    def listing(self) -> JobListing:
        """Return all jobs, as they were read a moment ago.

        Blocks: while they are read, at most 10 s.
        """
        try:
            self._listing = self._readings.get("The list of jobs", self._read)
        except RetryLater as error:
            return JobListing(self._listing.jobs, (str(error),))
        return self._listing

    def _read(self) -> JobListing:
        problems: list[str] = []
        try:
            records = Records(state_dir())
            engines = sorted({record.engine for record in records.all()})
            problems += records.unreadable()
        except HoldfastError as error:
            return JobListing(self._listing.jobs, (str(error),))
        found: dict[str, list[Job]] = {}
        for name in engines:
            try:
                found[name] = queue(on=name)
            except HoldfastError as error:  # jobs of the other engines are shown
                found[name] = self._by_engine.get(name, [])
                problems.append(f"Jobs on {name}: {error}")
        self._by_engine = found
        jobs = sorted(
            (job for of_one in found.values() for job in of_one),
            key=lambda job: (job.status.is_final, -job.id),
        )
        return JobListing(tuple(jobs), tuple(problems))


class JobRows:
    """Rows of the list. The durations of a job that has ended are read once."""

    def __init__(self) -> None:
        self._ended: dict[tuple[int, str], dict[str, Any]] = {}

    def rows(self, listing: JobListing) -> dict[str, Any]:
        """Return the list as JSON."""
        active = [job for job in listing.jobs if not job.status.is_final]
        ended = listing.jobs[len(active) :]
        shown = [*active, *ended[:MAX_ENDED]]
        rows = [self._row(job) for job in shown]
        self._ended = {
            (job.id, job.task_id): row for job, row in zip(shown, rows, strict=True) if job.status.is_final
        }
        return {"jobs": rows, "left_out": len(listing.jobs) - len(shown), "problems": listing.problems}

    def _row(self, job: Job) -> dict[str, Any]:
        return self._ended.get((job.id, job.task_id)) or _job(job, read_changes(_folder(job)))


def job_page(job: Job) -> dict[str, Any]:
    """Return everything that is recorded about a job as JSON, except its output."""
    found = describe_job(job)
    return {
        "job": _job(job, read_changes(_folder(job))),
        "attempts": [_attempt(one, found) for one in found.attempts],
        "lost_s": found.lost_s,
        "checkpoints": found.checkpoints,
        "folder": found.folder,
        "workdirs": found.workdirs,
        "logs": found.logs,
    }


def _job(job: Job, changes: Sequence[Change]) -> dict[str, Any]:
    return {**asdict(job), "status": job.status.value, "is_final": job.status.is_final} | _durations(
        job, changes
    )


def _durations(job: Job, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the durations up to a moment, and the one that grows since then.

    So a response stays the same while a job's status does, although its time passes.
    """
    as_of_s = job.ended_unix_s or (changes[-1].unix_s if changes else job.started_unix_s)
    if as_of_s is None:
        return {"running_s": 0.0, "down_s": 0.0, "as_of_unix_s": None, "grows": ""}
    until, later = (
        measure(
            changes,
            submitted_unix_s=job.submitted_unix_s,
            ended_unix_s=job.ended_unix_s,
            now_unix_s=as_of_s + more_s,
        )
        for more_s in (0.0, 1.0)
    )
    running_s, grows = until.running_s, ""
    if not changes and job.started_unix_s is not None:  # no history: see `durations_of`
        running_s = max(0.0, as_of_s - job.started_unix_s)
        grows = "" if job.status.is_final else "running"
    elif later.running_s > until.running_s:
        grows = "running"
    elif later.down_s > until.down_s:
        grows = "down"
    return {"running_s": running_s, "down_s": until.down_s, "as_of_unix_s": as_of_s, "grows": grows}


def _attempt(one: JobAttempt, found: JobDescription) -> dict[str, Any]:
    return {
        "number": one.number,
        "started_unix_s": one.started_unix_s,
        "running_unix_s": one.running_unix_s,
        "ended_unix_s": one.ended_unix_s,
        "status": one.status.value,
        "reason": one.reason,
        "machines": one.machines,
        "step": one.step,
        "lost_s": one.lost_s,
        "exits": [_exit(one, rank) for rank in range(found.job.num_nodes)],
        "checks": list(describe_checks(found.checks.get(one.number, {}))),
    }


def _exit(one: JobAttempt, rank: int) -> str:
    """Return the exit status of a node: a number, a signal, `lost`, or nothing yet."""
    outcome = one.outcomes.get(rank)
    if outcome is None or outcome.is_lost:
        return "" if one.ended_unix_s is None else "lost"
    return f"signal {outcome.killed_by}" if outcome.killed_by is not None else str(outcome.code)


def _folder(job: Job) -> Any:
    return job_folder(state_dir(), job.id)
