"""Arguments and output shared by the commands for jobs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from holdfast.cli.options import count
from holdfast.jobs.engine import Job, Line
from holdfast.jobs.registry import ENGINES


def add_engine(parser: argparse.ArgumentParser, *, default: str | None, shown: str) -> None:
    """Add `--on`, the engine."""
    parser.add_argument(
        "--on", choices=ENGINES, default=default, help=f"engine: {', '.join(ENGINES)} (default: {shown})"
    )


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add ID, the number of a job."""
    parser.add_argument(
        "id", type=count, metavar="ID", help="number of the job, as listed by `holdfast queue`"
    )


def job_row(job: Job) -> dict[str, Any]:
    """Return a job as a JSON object."""
    return {**asdict(job), "status": job.status.value}


def print_line(line: Line, num_nodes: int, *, is_json: bool) -> None:
    """Print a line of a job's output, prefixed with its node if it has several. Notes go to stderr."""
    if is_json:
        print(json.dumps({"node": line.node, "line": line.text}, ensure_ascii=False), flush=True)
    elif line.node is None:
        print(f"holdfast: {line.text}", file=sys.stderr, flush=True)
    elif num_nodes > 1:
        print(f"(node {line.node}) {line.text}", flush=True)
    else:
        print(line.text, flush=True)
