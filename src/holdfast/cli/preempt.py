"""`holdfast preempt`: takes a job's machine away as a cloud would, to see that the job survives it."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import add_job, job_row
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import InvalidInput
from holdfast.jobs.registry import find_engine
from holdfast.units import format_duration, parse_duration

_EXAMPLES = """
holdfast preempt 3
holdfast preempt 3 --lead 2m
holdfast preempt 3 --lead 0
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    job = "Preempt your own job: a notice now, the end of all its processes when the lead is over."
    parser = command(commands, "preempt", run, job=job, examples=_EXAMPLES)
    add_job(parser)
    parser.add_argument(
        "--lead", default="30s", metavar="T", help="time between notice and end, as 30s or 2m; 0: at once"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Give the notice; the rest happens in the background."""
    lead_s = _lead_seconds(args.lead)
    job = find_engine(args.id).preempt(args.id, lead_s=lead_s)
    if args.json:
        print_json(job_row(job))
    else:
        print(f"job {job.id} ({job.name}) is preempted; its machine goes in {format_duration(lead_s)}")
    return 0


def _lead_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text, "--lead")
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"--lead must be a duration like 30s, or 0, got {text!r}.")
    return seconds
