"""`holdfast forget`: removes ended jobs, with their files and output."""

from __future__ import annotations

import argparse
import time

from holdfast.cli.jobs import add_engine, print_errors
from holdfast.cli.options import Commands, add_json, agrees, check_can_agree, command
from holdfast.cli.tables import format_age, print_json, print_table
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.jobs.engine import Job, each, sorted_out
from holdfast.jobs.interface import find
from holdfast.jobs.registry import all_jobs, get_engine
from holdfast.system.units import parse_duration, plural

_EXAMPLES = """
holdfast forget 3 4 sweep
holdfast forget --ended-before 30d
holdfast forget --all-ended --yes
"""
_KEPT = 1
"""Exit status if a job was not removed."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "Buckets are not touched."
    parser = command(commands, "forget", run, details=details, examples=_EXAMPLES)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="number of a job, or the name of jobs")
    parser.add_argument(
        "--ended-before", metavar="T", help="jobs that ended longer ago than this, such as 30d"
    )
    parser.add_argument("--all-ended", action="store_true", help="all jobs that have ended")
    parser.add_argument(
        "--force", action="store_true", help="also remove jobs with files that are not in their bucket yet"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask; required without a terminal")
    add_engine(parser, default=None, shown="all")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Remove the jobs, after asking on the terminal."""
    if not args.jobs and args.ended_before is None and not args.all_ended:
        raise InvalidInput("Choose jobs: JOB, --ended-before T or --all-ended. Nothing was removed.")
    jobs, errors = _choose(args)
    if jobs and not args.dry_run:
        check_can_agree(args, "Nothing was removed.")
    if not args.json:
        _print(jobs)
    forgotten, kept = [], {}
    if jobs and not args.dry_run and (args.yes or agrees("remove these jobs?")):
        forgotten, kept = _forget(jobs, force=args.force)
    if args.json:
        reasons = [{"id": number, "why": str(why)} for number, why in kept.items()]
        print_json({"chosen": [job.id for job in jobs], "forgotten": forgotten, "kept": reasons})
    elif jobs:
        print(f"removed {plural(len(forgotten), 'job')}")
    status = print_errors([*kept.values(), *errors])
    return _KEPT if kept else status


def _choose(args: argparse.Namespace) -> tuple[list[Job], list[HoldfastError]]:
    """Return the chosen jobs, oldest first, and the errors of those that do not exist."""
    named, errors = sorted_out(each(find, args.jobs))
    found = {job.id: job for jobs in named for job in jobs}
    if args.ended_before is None and not args.all_ended:
        return list(found.values()), errors
    before_s = time.time()
    if args.ended_before is not None:
        before_s -= parse_duration(args.ended_before, "--ended-before")
    for job in get_engine(args.on).jobs() if args.on else all_jobs():
        if job.status.is_final and (job.ended_unix_s is None or job.ended_unix_s <= before_s):
            found[job.id] = job
    return sorted(found.values(), key=lambda job: job.id), errors


def _forget(jobs: list[Job], *, force: bool) -> tuple[list[int], dict[int, HoldfastError]]:
    forgotten: list[int] = []
    kept: dict[int, HoldfastError] = {}
    for job in jobs:
        try:
            get_engine(job.engine).forget(job.id, force=force)
        except HoldfastError as error:
            kept[job.id] = error
        else:
            forgotten.append(job.id)
    return forgotten, kept


def _print(jobs: list[Job]) -> None:
    if not jobs:
        print("no jobs")
        return
    rows = [(str(job.id), job.name, job.status.value, format_age(job.ended_unix_s)) for job in jobs]
    print_table(("ID", "NAME", "STATUS", "ENDED"), rows, right=("ID",), names=("NAME",))
