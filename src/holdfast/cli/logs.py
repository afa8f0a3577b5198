"""`holdfast logs`: prints the output of a job, of all its attempts."""

from __future__ import annotations

import argparse

from holdfast.cli.jobs import add_job, print_line
from holdfast.cli.options import Commands, add_json, command, step_number
from holdfast.jobs.registry import find_engine

_EXAMPLES = """
holdfast logs 3
holdfast logs 3 -f
holdfast logs 3 --node 1
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "It has the lines of all attempts. With -f, new lines are printed until the job has ended."
    parser = command(commands, "logs", run, details=details, examples=_EXAMPLES)
    add_job(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines until the job has ended")
    parser.add_argument(
        "--node", type=step_number, metavar="R", help="only the lines of this node, counted from 0"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    engine = find_engine(args.id)
    num_nodes = engine.job(args.id).num_nodes
    for line in engine.lines(args.id, follow=args.follow):
        if args.node in (None, line.node):
            print_line(line, num_nodes if args.node is None else 1, is_json=args.json)
    return 0
