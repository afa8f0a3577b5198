"""Description of a job: its attempts, durations, checkpoints, checks of its nodes, last lines and paths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.jobs.engine import Job
from holdfast.jobs.folder import JobFolder, job_folder, state_dir
from holdfast.jobs.history import Durations, JobAttempt, list_attempts, measure, read_changes
from holdfast.jobs.node.checks.disk import FEW_BYTES
from holdfast.jobs.node.checks.result import Check, NodeChecks, read_checks
from holdfast.jobs.node.mounts.mount_spec import outside_path, read_links
from holdfast.jobs.notifications import Delivery, read_deliveries
from holdfast.jobs.output.log_reader import last_lines
from holdfast.system.environment import read_progress
from holdfast.system.units import format_bytes, plural

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


_Values = Mapping[str, float]


def describe_checks(found: Mapping[int, NodeChecks]) -> Iterator[str]:
    """Yield one line per node and check, those of a node behind its own line.

    Args:
        found: results by node.
    """
    for rank, checks in sorted(found.items()):
        failed = len(checks.failed)
        outcome = f"{plural(failed, 'check')} failed" if failed else "all checks passed"
        refused = ", the attempt was not started" if checks.was_refused else ""
        waited = f"{checks.took_s:.2f} s, of which the job waited {checks.added_s:.2f} s"
        yield f"node {rank} ({checks.machine}): {outcome} in {waited}{refused}"
        for one in checks.checks:
            yield f"  {one.name} {one.where}: {_result(one)}"


def _result(check: Check) -> str:
    numbers = _NUMBERS[check.name](check.values) if check.name in _NUMBERS and check.values else ""
    return "; ".join(filter(None, (check.trouble, numbers))) or "passed"


def _rate(num_bytes: float, seconds: float) -> str:
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else "-"


def _disk(values: _Values) -> str:
    size = values.get("written_bytes", 0.0)
    if size <= FEW_BYTES:  # too few for a rate
        return f"{format_bytes(size)} written and synced in {1000 * values.get('write_s', 0.0):.0f} ms"
    write, read = (_rate(size, values.get(name, 0.0)) for name in ("write_s", "read_s"))
    return f"{format_bytes(size)} written and synced at {write}, read back at {read}"


def _space(values: _Values) -> str:
    needed, free = (format_bytes(values.get(name, 0.0)) for name in ("needed_bytes", "free_bytes"))
    return f"the next save takes {needed}, {free} free"


def _memory(values: _Values) -> str:
    free, total = (format_bytes(values.get(name, 0.0)) for name in ("available_bytes", "total_bytes"))
    return f"{free} of {total} free"


def _copy(values: _Values) -> str:
    return _rate(values.get("copied_bytes", 0.0), values.get("copy_s", 0.0))


def _product(values: _Values) -> str:
    size = values.get("size", 0.0)
    return f"matrices of {size:.0f} x {size:.0f}, in {1000 * values.get('products_s', 0.0):.0f} ms"


def _clock(values: _Values) -> str:
    return f"{values.get('offset_s', 0.0) + 0.0:+.2f} s"


_NUMBERS: Mapping[str, Callable[[_Values], str]] = {
    "disk": _disk,
    "space": _space,
    "memory": _memory,
    "copy": _copy,
    "gpu": _copy,
    "product": _product,
    "clock": _clock,
}
