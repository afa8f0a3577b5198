"""`holdfast logs`: prints the output of a job, of all its attempts."""

from __future__ import annotations

import argparse
import json
import sys

from holdfast.cli import print_note
from holdfast.cli.commands import argument, command, step_number
from holdfast.cli.jobs import JOB
from holdfast.cli.tables import format_time
from holdfast.jobs.engine import Job
from holdfast.jobs.interface import job
from holdfast.jobs.output import OutputBlock, OutputSelection, texts, with_prefix
from holdfast.jobs.registry import get_engine

_ENCODER = json.JSONEncoder(ensure_ascii=False)


class _OutputPrinter:
    """Printer to standard output. Changes of the job's status go to standard error."""

    def __init__(self, *, is_labelled: bool, has_times: bool, is_json: bool) -> None:
        self._is_labelled, self._has_times, self._is_json = is_labelled, has_times, is_json
        self._out = sys.stdout.buffer
        self._node: int | None = None
        self._is_line_start = True

    def print(self, block: OutputBlock) -> None:
        """Print a block."""
        if self._is_json:
            before = f'{{"node": {json.dumps(block.node)}, "line": '
            after = f', "unix_s": {json.dumps(block.unix_s)}}}\n'
            # One write per block: a log may have millions of lines.
            sys.stdout.write("".join(before + _ENCODER.encode(text) + after for text in texts(block)))
        elif block.node is None:
            sys.stdout.flush()
            for text in texts(block):
                print_note(text)
        else:
            self._print_lines(block)

    def close(self) -> None:
        """End an incomplete line, and pass on all that was printed."""
        if not self._is_line_start:
            self._out.write(b"\n")
        sys.stdout.flush()

    def _print_lines(self, block: OutputBlock) -> None:
        if block.node != self._node and not self._is_line_start:
            self._out.write(b"\n")
            self._is_line_start = True
        self._node = block.node
        moment = "-" * 19 if block.unix_s is None else format_time(block.unix_s)
        node = f"(node {block.node}) " if self._is_labelled else ""
        prefix = f"{moment} {node}" if self._has_times else node
        self._out.write(with_prefix(block.data, prefix.encode(), is_line_start=self._is_line_start))
        self._is_line_start = block.data.endswith(b"\n")


def print_output(job: Job, wanted: OutputSelection, *, is_json: bool, has_times: bool = False) -> None:
    """Print the chosen output of a job."""
    is_labelled = wanted.node is None and job.num_nodes > 1
    printer = _OutputPrinter(is_labelled=is_labelled, has_times=has_times, is_json=is_json)
    try:
        for block in get_engine(job.engine).output(job.id, wanted):
            printer.print(block)
            if wanted.follow:
                sys.stdout.flush()
    finally:
        printer.close()


@command(
    "logs",
    """
    holdfast logs 3
    holdfast logs 3 -f --tail 20
    holdfast logs bert --node 1 --timestamps
    """,
    JOB,
    argument("--follow, -f", "print new lines until the job has ended"),
    argument("--tail N", "begin with the last N lines of each node", step_number),
    argument("--timestamps, -t", "print the time before each line"),
    argument("--node R", "only the lines of this node, counted from 0", step_number),
    details=(
        "It has the lines of all attempts, sorted by time if there are several nodes. With -f, new lines "
        "are printed until the job has ended, and the exit status is that of the job."
    ),
)
def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    found = job(args.job)
    wanted = OutputSelection(
        follow=args.follow, node=args.node, tail=args.tail, is_timed=args.timestamps or args.json
    )
    print_output(found, wanted, is_json=args.json, has_times=args.timestamps)
    return get_engine(found.engine).job(found.id).exit_status if args.follow else 0
