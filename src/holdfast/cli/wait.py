"""`holdfast wait`: waits until jobs have ended."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import job_row
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.jobs.interface import wait

_EXAMPLES = """
holdfast wait 3 && echo "it has succeeded"
holdfast wait 3 4 sweep --timeout 2h
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "The exit status is 0 if all have succeeded. Otherwise it is that of the first that has not: the "
        "status of its run command, or 1 if it was cancelled."
    )
    parser = command(commands, "wait", run, details=details, examples=_EXAMPLES)
    parser.add_argument("jobs", nargs="+", metavar="JOB", help="number of a job, or the name of jobs")
    parser.add_argument("--timeout", metavar="T", help="longest time to wait, such as 2h (default: no limit)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Wait, and report how the jobs have ended."""
    jobs = wait(*args.jobs, timeout=args.timeout)
    if args.json:
        print_json([job_row(job) for job in jobs])
    else:
        for job in jobs:
            reason = job.reason.partition("\n")[0]
            print(f"job {job.id} ({job.name}) is {job.status.value}" + (f": {reason}" if reason else ""))
    return next((job.exit_status for job in jobs if job.exit_status), 0)
