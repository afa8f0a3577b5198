"""Arguments and output shared by the commands for jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.cli import TROUBLE, print_note
from holdfast.cli.commands import Argument, argument
from holdfast.errors import HoldfastError
from holdfast.jobs.description import durations_of
from holdfast.jobs.engine import Job
from holdfast.jobs.registry import ENGINES
from holdfast.system.documents import to_plain

JOB = argument("job JOB", "number of the job, or the name of the newest")


def engine_option(*, default: str | None, shown: str) -> Argument:
    """Declare `--on`, the engine."""
    text = f"engine: {', '.join(ENGINES)} (default: {shown})"
    return argument("--on", text, choices=ENGINES, default=default)


def job_row(job: Job) -> dict[str, Any]:
    """Return a job as a JSON object, with its durations."""
    return {**to_plain(job), "status": job.status.value, **to_plain(durations_of(job))}


def print_errors(errors: Iterable[HoldfastError]) -> int:
    """Print the errors of single jobs after what was done. Return the exit status if there are any, or 0."""
    status = 0
    for error in errors:
        print_note(error)
        status = TROUBLE
    return status


def format_span(seconds: float) -> str:
    """Return a duration in at most six characters, such as `45s`, `12m03s`, `2h05m` or `3d04h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
