"""`holdfast cancel`: cancels jobs."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import job_row, print_errors
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import InvalidInput
from holdfast.jobs.engine import sorted_out
from holdfast.jobs.interface import cancel_each

_EXAMPLES = """
holdfast cancel 3
holdfast cancel 3 4 sweep
holdfast cancel --all
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "Each has 30 s (on Slurm 60 s) to save, then it is killed. If some cannot be cancelled, all others "
        "are, and the exit status is 2."
    )
    parser = command(commands, "cancel", run, details=details, examples=_EXAMPLES)
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB", help="number of a job, or the name of jobs that have not ended"
    )
    parser.add_argument("--all", action="store_true", help="all jobs that have not ended")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Request the cancellations. The jobs end in the background."""
    if bool(args.jobs) == args.all:
        raise InvalidInput("Choose jobs by number or name, or all with --all. Nothing was cancelled.")
    found, errors = sorted_out(cancel_each(*args.jobs, every=args.all))
    if args.json:
        print_json([job_row(job) for job in found])
    elif not found and not errors:
        print("no jobs")
    else:
        for job in found:
            verb = "was" if job.status.is_final else "is being"
            print(f"job {job.id} ({job.name}) {verb} cancelled")
    return print_errors(errors)
