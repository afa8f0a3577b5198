"""What the commands about jobs share: options, rows, lines of output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from holdfast.cli.options import count
from holdfast.jobs.engine import Job, Line
from holdfast.jobs.registry import ENGINES


def add_engine(parser: argparse.ArgumentParser, *, default: str | None, meant: str) -> None:
    """Where jobs run."""
    parser.add_argument(
        "--on", choices=ENGINES, default=default, help=f"engine: {', '.join(ENGINES)} (default: {meant})"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Which job."""
    parser.add_argument("id", type=count, metavar="ID", help="number of the job, as `holdfast queue` has it")


def job_row(job: Job) -> dict[str, Any]:
    """A job as JSON."""
    return {**asdict(job), "status": job.status.value}


def print_line(line: Line, num_nodes: int, *, is_json: bool) -> None:
    """Print a line of a job's output, with the node where there are several; words about it to stderr."""
    if is_json:
        print(json.dumps({"node": line.node, "line": line.text}, ensure_ascii=False), flush=True)
    elif line.node is None:
        print(f"holdfast: {line.text}", file=sys.stderr, flush=True)
    elif num_nodes > 1:
        print(f"(node {line.node}) {line.text}", flush=True)
    else:
        print(line.text, flush=True)
