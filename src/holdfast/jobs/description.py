"""Description of a job: its attempts, durations, checkpoints, checks of its nodes, last lines and paths."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import JobFolder, job_folder, state_dir, state_path
from holdfast.jobs.history import Change, Durations, JobAttempt, list_attempts, measure, read_changes
from holdfast.jobs.node.checks.gate import FEW_BYTES
from holdfast.jobs.node.checks.result import Check, NodeChecks, describe_failures, read_checks
from holdfast.jobs.node.mounts.mount_records import outside_path, read_links
from holdfast.jobs.notifications import Delivery, read_deliveries
from holdfast.jobs.output import last_lines
from holdfast.jobs.records import JobRecord, Records
from holdfast.system.environment import read_progress
from holdfast.system.units import format_bytes, plural

if TYPE_CHECKING:
    from holdfast.watch.report.summary import CheckedNode

_NUM_LINES = 10
_NUM_CHECKED = 20  # newest attempts whose checks are read


class JobDescription(Struct, frozen=True):
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
    checks: dict[int, dict[int, NodeChecks]] = {}


def describe_job(job: Job) -> JobDescription:
    """Return the description of a job."""
    folder = job_folder(state_dir(), job.id)
    changes = read_changes(folder)
    attempts = tuple(list_attempts(changes))
    ranks = range(job.num_nodes)
    lines = {rank: last_lines(folder.log(rank), _NUM_LINES) for rank in ranks}
    return JobDescription(
        job=job,
        durations=durations_of(job, changes),
        attempts=attempts,
        lost_s=sum(one.lost_s for one in attempts),
        checkpoints=recorded_homes(folder),
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


def recorded_homes(folder: JobFolder) -> dict[str, int]:
    """Return the newest reported step of each home, named as outside of the job."""
    links = read_links(folder)
    return {outside_path(home, links): step for home, step in read_progress(folder.progress).steps.items()}


def durations_of(
    job: Job, changes: Sequence[Change] | None = None, now_unix_s: float | None = None
) -> Durations:
    """Return the durations of a job. Without a history, all time since its start counts as running."""
    changes = read_changes(job_folder(state_dir(), job.id)) if changes is None else changes
    now_s = time.time() if now_unix_s is None else now_unix_s
    until_s = now_s if job.ended_unix_s is None else job.ended_unix_s
    found = measure(changes, submitted_unix_s=job.submitted_unix_s, until_unix_s=until_s)
    if changes or job.started_unix_s is None:
        return found
    return Durations(found.total_s, max(0.0, until_s - job.started_unix_s), 0.0)


def read_node_checks(home: Store) -> tuple[CheckedNode, ...]:
    """Return the checks of all jobs of this user that have trained a run, oldest first."""
    try:
        records = Records(state_path()).all()
    except (HoldfastError, OSError):
        return ()  # without jobs, or their folder cannot be used: `holdfast queue` has the reason
    found = [one for record in records for one in _checked_nodes(record, home.url)]
    return tuple(sorted(found, key=lambda node: node.unix_s))


def _checked_nodes(record: JobRecord, home: str) -> Iterator[CheckedNode]:
    from holdfast.watch.report.summary import CheckedNode

    folder = job_folder(state_path(), record.job.number)
    if home not in recorded_homes(folder):
        return
    attempts = {one.number: one for one in list_attempts(read_changes(folder))}
    for number, nodes in recorded_checks(folder, list(attempts.values()), record.job.spec.num_nodes).items():
        attempt = attempts[number]
        for node, checks in nodes.items():
            cost_s = checks.added_s
            if checks.was_refused and attempt.ended_unix_s is not None:
                cost_s = attempt.ended_unix_s - attempt.started_unix_s
            yield CheckedNode(
                job=record.job.number,
                attempt=number,
                node=node,
                machine=checks.machine,
                unix_s=checks.unix_s,
                num_checks=len(checks.checks),
                failures=describe_failures(checks.failed),
                was_refused=checks.was_refused,
                cost_s=cost_s,
            )


def describe_checks(found: Mapping[int, NodeChecks]) -> Iterator[str]:
    """Yield one line per node and check, those of a node behind its own line."""
    for rank, checks in sorted(found.items()):
        failed = len(checks.failed)
        outcome = f"{plural(failed, 'check')} failed" if failed else "all checks passed"
        refused = ", the attempt was not started" if checks.was_refused else ""
        waited = f"{checks.took_s:.2f} s, of which the job waited {checks.added_s:.2f} s"
        yield f"node {rank} ({checks.machine}): {outcome} in {waited}{refused}"
        for check in checks.checks:
            yield f"  {check.name} {check.where}: {describe_check(check)}"


def describe_check(check: Check) -> str:
    """Return the trouble and the numbers of a check for people."""
    return "; ".join(filter(None, (check.trouble, _numbers(check) if check.values else ""))) or "passed"


def _numbers(check: Check) -> str:
    values = defaultdict(float, check.values)

    def size(name: str) -> str:
        return format_bytes(values[name])

    def rate(name: str, seconds: str) -> str:
        return f"{format_bytes(values[name] / values[seconds])}/s" if values[seconds] > 0 else "-"

    match check.name:
        case "disk" if values["written_bytes"] <= FEW_BYTES:  # too few for a rate
            return f"{size('written_bytes')} written and synced in {1000 * values['write_s']:.0f} ms"
        case "disk":
            write, read = (rate("written_bytes", name) for name in ("write_s", "read_s"))
            return f"{size('written_bytes')} written and synced at {write}, read back at {read}"
        case "space":
            return f"the next save takes {size('needed_bytes')}, {size('free_bytes')} free"
        case "memory":
            return f"{size('available_bytes')} of {size('total_bytes')} free"
        case "copy" | "gpu":
            return rate("copied_bytes", "copy_s")
        case "product":
            shape = f"{values['size']:.0f} x {values['size']:.0f}"
            return f"matrices of {shape}, in {1000 * values['products_s']:.0f} ms"
        case "clock":
            return f"{values['offset_s'] + 0.0:+.2f} s"
    return ""
