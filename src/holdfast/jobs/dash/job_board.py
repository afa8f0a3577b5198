"""Board of all jobs, read once for all pages."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.engine import Job
from holdfast.jobs.interface import queue
from holdfast.jobs.records import Records
from holdfast.jobs.state_folder import state_dir
from holdfast.watch.report.kept_readings import KeptReadings

_MIN_AGE_S = 1.0
_REST = 4.0
"""Pause between two readings, as a multiple of the time that one takes."""


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
