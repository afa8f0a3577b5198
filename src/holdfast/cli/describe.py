"""`holdfast describe`: shows everything that is recorded about a job."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from operator import attrgetter, itemgetter

from holdfast.cli import tables
from holdfast.cli.commands import command
from holdfast.cli.jobs import JOB, format_span, job_row
from holdfast.cli.tables import Column
from holdfast.jobs.description import JobDescription, describe_checks
from holdfast.jobs.history import JobAttempt
from holdfast.jobs.interface import describe
from holdfast.system.documents import to_plain
from holdfast.system.units import plural


def print_checks(found: JobDescription) -> None:
    """Print the checks of the newest attempt, and of all attempts with failed ones."""
    newest = max(found.checks, default=None)
    for number, of_nodes in found.checks.items():
        if number != newest and not any(one.failed for one in of_nodes.values()):
            continue
        print(f"\nchecks before attempt {number}:")
        for line in describe_checks(of_nodes):
            tables.print_text(
                tables.printable(line.lstrip()), indent=" " * (4 + len(line) - len(line.lstrip()))
            )


@command(
    "describe",
    """
    holdfast describe 3
    holdfast describe gpt --json | jq '.attempts[].outcomes'
    """,
    JOB,
    details=(
        "It lists the attempts with their times, machines, reasons and exit statuses, the cost of "
        "interruptions, the newest checkpoint of each home, the last lines of the output, and the paths "
        "of the job's files."
    ),
)
def run(args: argparse.Namespace) -> None:
    """Show the job."""
    found = describe(args.job)
    tables.print_result(args, {**to_plain(found), "job": job_row(found.job)}, lambda: _print(found))


def _print(found: JobDescription) -> None:
    tables.print_fields(_fields(found), width=14)
    _print_attempts(found)
    print_checks(found)
    if found.checkpoints:
        print("\ncheckpoints:")
        columns = Column("HOME", itemgetter(0), "name"), Column("NEWEST STEP", itemgetter(1), "right")
        tables.print_table(columns, found.checkpoints.items())
    for rank, lines in found.last_lines.items():
        print("\nlast lines:" if found.job.num_nodes == 1 else f"\nlast lines of node {rank}:")
        for line in lines:
            print(f"    {line}")


def _fields(found: JobDescription) -> Iterator[tuple[str, str]]:
    job, durations = found.job, found.durations
    yield "job", f"{job.id} ({job.name})"
    yield "status", job.status.value
    if job.reason:
        # after the end, the further lines are those of the output, which follow below
        yield "reason", job.reason.partition("\n")[0] if job.status.is_final else " ".join(job.reason.split())
    if job.status.is_final:
        yield "exit status", str(job.exit_status)
    engine_id = f", there {job.engine_job_id}" if job.engine_job_id else ""
    yield "engine", f"{job.engine}{engine_id}"
    yield "nodes", str(job.num_nodes)
    if any(job.gpus):
        lists = [", ".join(gpus) for gpus in job.gpus]
        named = [f"node {rank}: {gpus}" for rank, gpus in enumerate(lists)]
        yield "GPUs", "; ".join(named if job.num_nodes > 1 else lists)
    if job.priority:
        yield "priority", str(job.priority)
    yield "task id", job.task_id
    yield "submitted", tables.format_time(job.submitted_unix_s)
    if job.ended_unix_s is not None:
        yield "ended", tables.format_time(job.ended_unix_s)
    running, down = format_span(durations.running_s), format_span(durations.down_s)
    yield "durations", f"{format_span(durations.total_s)} in total, {running} running, {down} down"
    if job.recoveries:
        recoveries = plural(job.recoveries, "recovery", "recoveries")
        lost = format_span(found.lost_s)
        yield "cost", f"{recoveries}: {down} down, and {lost} of work since the newest checkpoints"
    yield "folder", found.folder
    if found.notifications:
        failed = [one for one in found.notifications if one.error]
        texts = [f"{one.status.value} not sent to {one.target} ({one.error})" for one in failed]
        yield "notifications", "; ".join([f"{len(found.notifications) - len(failed)} sent", *texts])
    for rank, path in enumerate(found.workdirs):
        yield "workdir" if job.num_nodes == 1 else f"workdir {rank}", path
    for rank, path in enumerate(found.logs):
        yield "log" if job.num_nodes == 1 else f"log {rank}", path


def _print_attempts(found: JobDescription) -> None:
    if not found.attempts:
        return

    def took(of: JobAttempt) -> str | None:
        return None if of.ended_unix_s is None else format_span(of.ended_unix_s - of.started_unix_s)

    print("\nattempts:")
    columns = [
        Column("#", attrgetter("number"), "right"),
        Column("STARTED", lambda of: tables.format_time(of.started_unix_s)),
        Column("TOOK", took, "right"),
        Column("LOST", lambda of: format_span(of.lost_s) if of.lost_s else None, "right"),
        Column("STEP", attrgetter("step"), "right"),
        Column("EXIT", lambda of: _exits(of, found.job.num_nodes)),
        Column("RESULT", lambda of: of.reason.partition("\n")[0] or of.status.value, "text"),
    ]
    if any(one.machines for one in found.attempts):
        columns.insert(-1, Column("MACHINES", lambda of: " ".join(of.machines) or None, "name"))
    tables.print_table(columns, found.attempts)


def _exits(of: JobAttempt, num_nodes: int) -> str:
    if of.ended_unix_s is None and not of.outcomes:
        return "-"
    return " ".join(of.exit_of(rank) or "-" for rank in range(num_nodes))
