"""`holdfast wait`: waits until jobs have ended."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import job_row, print_errors
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import HoldfastError
from holdfast.jobs.engine import Job
from holdfast.jobs.interface import wait_each

_EXAMPLES = """
holdfast wait 3 && echo "it has succeeded"
holdfast wait 3 4 sweep --timeout 2h
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "Each is printed when it ends. The exit status is 0 if all have succeeded. Otherwise it is that of "
        "the oldest that has not: the status of its run command, or 1 if it was cancelled. It is 2 if one "
        "does not exist or does not end in time; the others are waited for."
    )
    parser = command(commands, "wait", run, details=details, examples=_EXAMPLES)
    parser.add_argument("jobs", nargs="+", metavar="JOB", help="number of a job, or the name of jobs")
    parser.add_argument("--timeout", metavar="T", help="longest time to wait, such as 2h (default: no limit)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Wait, and report how the jobs have ended."""
    jobs: list[Job] = []
    status = 0
    for one in wait_each(*args.jobs, timeout=args.timeout):
        if isinstance(one, HoldfastError):
            status = print_errors([one])
            continue
        jobs.append(one)
        if not args.json:
            reason = one.reason.partition("\n")[0]
            why = f": {reason}" if reason else ""
            print(f"job {one.id} ({one.name}) is {one.status.value}{why}", flush=True)
    jobs.sort(key=lambda job: job.id)
    if args.json:
        print_json([job_row(job) for job in jobs])
    return status or next((job.exit_status for job in jobs if job.exit_status), 0)
