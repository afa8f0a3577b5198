"""`holdfast cancel`: cancels a job."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import add_job, job_row
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.jobs.registry import find_engine

_EXAMPLES = """
holdfast cancel 3
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "It has 30 s (on Slurm 60 s) to save, then it is killed."
    parser = command(commands, "cancel", run, details=details, examples=_EXAMPLES)
    add_job(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Request the cancellation. The job ends in the background."""
    job = find_engine(args.id).cancel(args.id)
    if args.json:
        print_json(job_row(job))
    else:
        print(f"job {job.id} ({job.name}) is being cancelled")
    return 0
