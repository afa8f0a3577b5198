"""`holdfast queue`: lists jobs and their status."""

from __future__ import annotations

import argparse
import time

from holdfast.cli.jobs import add_engine, job_row
from holdfast.cli.options import Commands, add_json, command, count
from holdfast.cli.tables import format_age, print_json, print_table
from holdfast.jobs.engine import Job
from holdfast.jobs.registry import all_jobs, get_engine
from holdfast.units import format_duration

_EXAMPLES = """
holdfast queue
holdfast queue --json | jq '.[] | select(.status == "RUNNING") | .id'
"""
_SHOWN = 20


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "Controllers that have died are started again."
    parser = command(commands, "queue", run, details=details, examples=_EXAMPLES)
    parser.add_argument("--tail", type=count, metavar="K", help=f"only the newest K jobs (default: {_SHOWN})")
    add_engine(parser, default=None, shown="all")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the jobs, newest first."""
    jobs = (get_engine(args.on).jobs() if args.on else all_jobs())[::-1]
    if args.json:
        print_json([job_row(job) for job in jobs[: args.tail]])
    elif not jobs:
        print("no jobs")
    else:
        shown = jobs[: args.tail or _SHOWN]
        columns = ("ID", "NAME", "ON", "SUBMITTED", "RAN FOR", "NODES", "RECOVERIES", "STEP", "STATUS", "WHY")
        print_table(
            columns,
            map(_cells, shown),
            right=("ID", "NODES", "RECOVERIES", "STEP"),
            names=("NAME",),
            text="WHY",
            spare=("NODES", "RAN FOR", "ON"),
        )
        if len(shown) < len(jobs):
            print(f"{len(jobs) - len(shown)} older jobs not shown; use --tail K to show more")
    return 0


def _cells(job: Job) -> tuple[str, ...]:
    return (
        str(job.id),
        job.name,
        job.engine,
        format_age(job.submitted_unix_s),
        _format_span(job),
        str(job.num_nodes),
        str(job.recoveries),
        "-" if job.step is None else str(job.step),
        job.status.value,
        job.reason.partition("\n")[0],
    )


def _format_span(job: Job) -> str:
    if job.started_unix_s is None:
        return "-"
    return format_duration(max(0.0, (job.ended_unix_s or time.time()) - job.started_unix_s))
