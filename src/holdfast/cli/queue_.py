"""`holdfast queue`: lists jobs and their status."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.jobs import add_engine, format_span, job_row
from holdfast.cli.options import Commands, add_json, command, step_number
from holdfast.cli.tables import print_json, print_table
from holdfast.jobs.description import durations_of
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import state_dir
from holdfast.jobs.interface import queue
from holdfast.jobs.records import Records
from holdfast.jobs.status import JobStatus
from holdfast.system.units import plural

_EXAMPLES = """
holdfast queue
holdfast queue --status failed --all
holdfast queue --json | jq '.[] | select(.status == "RUNNING") | .id'
"""
_SHOWN = 20
_COLUMNS = ("ID", "NAME", "STATUS", "TOTAL", "RUNNING", "DOWN", "REC", "STEP", "NODES", "ON", "WHY")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "Jobs that have not ended are always listed, and first. TOTAL is the time since the submission, "
        "RUNNING with the run command started, DOWN between two attempts; REC counts recoveries, and ON "
        "has the id of the job there. "
        "Controllers that have died are started again."
    )
    parser = command(commands, "queue", run, details=details, examples=_EXAMPLES)
    parser.add_argument(
        "--status",
        action="append",
        default=[],
        metavar="S",
        help=f"only jobs with this status, such as {JobStatus.FAILED.value}; can be repeated",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="also list all jobs that have ended")
    which.add_argument(
        "--tail",
        type=step_number,
        metavar="K",
        help=f"of those that have ended, only the newest K (default: {_SHOWN})",
    )
    add_engine(parser, default=None, shown="all")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the jobs: those that have not ended, then the others, each newest first."""
    jobs = queue(on=args.on, statuses=args.status)
    for message in Records(state_dir()).unreadable():
        print(f"holdfast: {message}", file=sys.stderr)
    active = [job for job in jobs if not job.status.is_final]
    ended = jobs[len(active) :]
    is_whole = args.all or (args.json and args.tail is None)
    shown = active + (ended if is_whole else ended[: _SHOWN if args.tail is None else args.tail])
    if args.json:
        print_json([job_row(job) for job in shown])
    elif not jobs:
        print("no jobs")
    else:
        _print_table(shown)
        # The row has the first line only: this is the same for all jobs of an engine that does not answer.
        for reason in dict.fromkeys(job.reason for job in active if "\n" in job.reason):
            print(f"holdfast: {' '.join(reason.replace(chr(10), ': ', 1).split())}", file=sys.stderr)
        if left := len(jobs) - len(shown):
            print(f"{plural(left, 'older job')} not shown; use --all or --tail K to show more")
    return 0


def _print_table(jobs: list[Job]) -> None:
    print_table(
        _COLUMNS,
        map(_cells, jobs),
        right=("ID", "TOTAL", "RUNNING", "DOWN", "REC", "STEP", "NODES"),
        names=("NAME",),
        text="WHY",
        spare=("NODES", "TOTAL", "STEP", "ON"),
    )


def _cells(job: Job) -> tuple[str, ...]:
    durations = durations_of(job)
    return (
        str(job.id),
        job.name,
        job.status.value,
        format_span(durations.total_s),
        format_span(durations.running_s),
        format_span(durations.down_s),
        str(job.recoveries),
        "-" if job.step is None else str(job.step),
        str(job.num_nodes),
        f"{job.engine} {job.engine_job_id or ''}".rstrip(),
        job.reason.partition("\n")[0],
    )
