"""`holdfast logs`: prints the output of a job, of all its attempts."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.jobs import add_which
from holdfast.cli.options import Commands, add_json, command, step_number
from holdfast.cli.output_printer import OutputPrinter
from holdfast.jobs.interface import job
from holdfast.jobs.output.block import OutputSelection
from holdfast.jobs.registry import get_engine

_EXAMPLES = """
holdfast logs 3
holdfast logs 3 -f --tail 20
holdfast logs bert --node 1 --timestamps
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "It has the lines of all attempts, sorted by time if there are several nodes. With -f, new lines "
        "are printed until the job has ended, and the exit status is that of the job."
    )
    parser = command(commands, "logs", run, details=details, examples=_EXAMPLES)
    add_which(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines until the job has ended")
    parser.add_argument(
        "--tail", type=step_number, metavar="N", help="begin with the last N lines of each node"
    )
    parser.add_argument("--timestamps", "-t", action="store_true", help="print the time before each line")
    parser.add_argument(
        "--node", type=step_number, metavar="R", help="only the lines of this node, counted from 0"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    found = job(args.job)
    engine = get_engine(found.engine)
    printer = OutputPrinter(
        is_labelled=args.node is None and found.num_nodes > 1,
        has_times=args.timestamps,
        is_json=args.json,
    )
    wanted = OutputSelection(
        follow=args.follow,
        node=args.node,
        tail=args.tail,
        is_timed=args.timestamps or args.json,
        with_progress=args.follow and sys.stdout.isatty() and not args.json,
    )
    try:
        for block in engine.output(found.id, wanted):
            printer.print(block)
            if args.follow:
                printer.flush()
    finally:
        printer.close()
    return engine.job(found.id).exit_status if args.follow else 0
