"""Description of a job: its attempts, durations, checkpoints, last lines and paths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.jobs.engine import Job
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.history import Durations, JobAttempt, list_attempts, measure, read_changes
from holdfast.jobs.node.checks.result import NodeChecks, read_checks
from holdfast.jobs.node.mounts.mount_spec import outside_path, read_links
from holdfast.jobs.notifications.outbox import Delivery, read_deliveries
from holdfast.jobs.output.tail import last_lines
from holdfast.jobs.state_folder import state_dir
from holdfast.system.environment import read_progress

_NUM_LINES = 10
_NUM_CHECKED = 20
"""Newest attempts whose checks are read."""


@dataclass(frozen=True, slots=True)
class JobDescription:
    """Job with everything that is recorded about it.

    Attributes:
        job: its status.
        durations: its times in total, running and down.
        attempts: its attempts, oldest first. Empty for jobs on SkyPilot.
        lost_s: running time that was repeated, because it came after the newest checkpoint of an attempt.
        checkpoints: newest step that training has reported, by home, as its path is outside of the job.
        last_lines: last lines of each node's output, by node.
        folder: path of the job's folder.
        workdirs: path of each node's working directory.
        logs: path of each node's output.
        notifications: results of sending notifications, oldest first.
        checks: results of the checks before each attempt, by number of the attempt and by node.
    """

    job: Job
    durations: Durations
    attempts: tuple[JobAttempt, ...]
    lost_s: float
    checkpoints: dict[str, int]
    last_lines: dict[int, list[str]]
    folder: str
    workdirs: list[str]
    logs: list[str]
    notifications: tuple[Delivery, ...] = ()
    checks: dict[int, dict[int, NodeChecks]] = field(default_factory=dict)


def describe_job(job: Job) -> JobDescription:
    """Return the description of a job."""
    folder = _folder(job)
    changes = read_changes(folder)
    attempts = tuple(list_attempts(changes))
    ranks = range(job.num_nodes)
    lines = {rank: last_lines(folder.log(rank), _NUM_LINES) for rank in ranks}
    return JobDescription(
        job=job,
        durations=durations_of(job),
        attempts=attempts,
        lost_s=sum(one.lost_s for one in attempts),
        checkpoints=checkpoints_of(job),
        last_lines={rank: texts for rank, texts in lines.items() if texts},
        folder=str(folder.path),
        workdirs=[str(path) for path in map(folder.workdir, ranks) if path.exists()],
        logs=[str(path) for path in map(folder.log, ranks) if path.exists()],
        notifications=tuple(read_deliveries(folder)),
        checks=recorded_checks(folder, attempts, job.num_nodes),
    )


def recorded_checks(
    folder: JobFolder, attempts: Sequence[JobAttempt], num_nodes: int
) -> dict[int, dict[int, NodeChecks]]:
    """Return the checks before the newest attempts, by attempt and node."""
    found: dict[int, dict[int, NodeChecks]] = {}
    for number in [one.number for one in attempts][-_NUM_CHECKED:]:
        for rank in range(num_nodes):
            if (checks := read_checks(folder.node(number, rank).checks)) is not None:
                found.setdefault(number, {})[rank] = checks
    return found


def checkpoints_of(job: Job) -> dict[str, int]:
    """Return the newest step that training has reported, by home.

    Paths of homes are those outside of the job.
    """
    return recorded_homes(_folder(job))


def recorded_homes(folder: JobFolder) -> dict[str, int]:
    """Return the newest reported step of each home, named as outside of the job."""
    links = read_links(folder)
    return {outside_path(home, links): step for home, step in read_progress(folder.progress).items()}


def durations_of(job: Job) -> Durations:
    """Return the durations of a job. Without a history, all time since its start counts as running."""
    now_s = time.time()
    changes = read_changes(_folder(job))
    found = measure(
        changes, submitted_unix_s=job.submitted_unix_s, ended_unix_s=job.ended_unix_s, now_unix_s=now_s
    )
    if changes or job.started_unix_s is None:
        return found
    until_s = now_s if job.ended_unix_s is None else job.ended_unix_s
    return Durations(found.total_s, max(0.0, until_s - job.started_unix_s), 0.0)


def _folder(job: Job) -> JobFolder:
    return job_folder(state_dir(), job.id)
