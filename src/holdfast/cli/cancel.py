"""`holdfast cancel`: ends a job for good."""

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
    job = "End a job: it may save for up to 30 s (on Slurm 60 s), then it is ended by force."
    parser = command(commands, "cancel", run, job=job, examples=_EXAMPLES)
    add_job(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Ask for it; the job ends in the background."""
    job = find_engine(args.id).cancel(args.id)
    if args.json:
        print_json(job_row(job))
    else:
        print(f"job {job.id} ({job.name}) is told to stop")
    return 0
