"""`holdfast preempt`: simulates a preemption, to check that a job survives it."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import add_which, job_row
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import InvalidInput
from holdfast.jobs.interface import job
from holdfast.jobs.registry import get_engine
from holdfast.system.units import format_duration, parse_duration

_EXAMPLES = """
holdfast preempt 3
holdfast preempt 3 --lead 2m
holdfast preempt bert --lead 0
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "The job receives a notice now. After the lead, all its processes are killed; then it restarts."
    parser = command(commands, "preempt", run, details=details, examples=_EXAMPLES)
    add_which(parser)
    parser.add_argument(
        "--lead",
        default="30s",
        metavar="T",
        help="time between notice and kill, such as 30s or 2m (default: 30s)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Send the notice. The processes are killed in the background."""
    lead_s = _lead_seconds(args.lead)
    found = job(args.job)
    preempted = get_engine(found.engine).preempt(found.id, lead_s=lead_s)
    if args.json:
        print_json(job_row(preempted))
    else:
        when = format_duration(lead_s)
        print(f"job {found.id} ({found.name}) is preempted; its processes are killed in {when}")
    return 0


def _lead_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text, "--lead")
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"--lead must be a duration such as 30s, or 0, got {text!r}.")
    return seconds
