"""Checks of nodes of the jobs that have trained a run, from the state folder."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError
from holdfast.jobs.description import recorded_checks, recorded_homes
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.history import JobAttempt, list_attempts, read_changes
from holdfast.jobs.node.checks.result import NodeChecks, describe_failures
from holdfast.jobs.records import JobRecord, Records
from holdfast.watch.report.summary import CheckedNode


def read_node_checks(home: Store) -> tuple[CheckedNode, ...]:
    """Return the checks of all jobs that have trained a run, oldest first.

    Jobs of other users and of other state folders are not known.
    """
    try:
        records = Records(state_dir()).all()
    except HoldfastError:
        return ()  # without jobs, or their folder cannot be used: `holdfast queue` has the reason
    found = [one for record in records for one in _of_job(record, home.url)]
    return tuple(sorted(found, key=lambda one: one.unix_s))


def _of_job(record: JobRecord, home: str) -> Iterator[CheckedNode]:
    folder = job_folder(state_dir(), record.id)
    if home not in recorded_homes(folder):
        return
    attempts = {one.number: one for one in list_attempts(read_changes(folder))}
    found = recorded_checks(folder, list(attempts.values()), record.spec.num_nodes)
    for number, nodes in found.items():
        for node, checks in nodes.items():
            yield _checked(record.id, attempts[number], node, checks)


def _checked(job: int, attempt: JobAttempt, node: int, checks: NodeChecks) -> CheckedNode:
    cost_s = checks.added_s
    if checks.was_refused and attempt.ended_unix_s is not None:
        cost_s = attempt.ended_unix_s - attempt.started_unix_s
    return CheckedNode(
        job=job,
        attempt=attempt.number,
        node=node,
        machine=checks.machine,
        unix_s=checks.unix_s,
        num_checks=len(checks.checks),
        failures=describe_failures(checks.failed),
        was_refused=checks.was_refused,
        cost_s=cost_s,
    )
