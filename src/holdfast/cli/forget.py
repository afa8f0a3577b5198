"""`holdfast forget`: removes ended jobs, with their files and output."""

from __future__ import annotations

import argparse
import sys
import time

from holdfast.cli.jobs import add_engine
from holdfast.cli.options import Commands, add_json, agrees, check_can_agree, command, count
from holdfast.cli.tables import format_age, print_json, print_table
from holdfast.errors import Conflict, InvalidInput
from holdfast.jobs.engine import Job
from holdfast.jobs.registry import all_jobs, find_engine, get_engine
from holdfast.units import parse_duration, plural

_EXAMPLES = """
holdfast forget 3 4
holdfast forget --ended-before 30d
holdfast forget --all-ended --yes
"""
_KEPT = 1
"""Exit status if a job was not removed."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "Buckets are not touched."
    parser = command(commands, "forget", run, details=details, examples=_EXAMPLES)
    parser.add_argument("ids", nargs="*", type=count, metavar="ID", help="numbers of jobs")
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
    if not args.ids and args.ended_before is None and not args.all_ended:
        raise InvalidInput("Choose jobs: ID, --ended-before T or --all-ended. Nothing was removed.")
    jobs = _choose(args)
    if jobs and not args.dry_run:
        check_can_agree(args, "Nothing was removed.")
    if not args.json:
        _print(jobs)
    forgotten, kept = [], {}
    if jobs and not args.dry_run and (args.yes or agrees("remove these jobs?")):
        forgotten, kept = _forget(jobs, force=args.force)
    if args.json:
        reasons = [{"id": number, "why": why} for number, why in kept.items()]
        print_json({"chosen": [job.id for job in jobs], "forgotten": forgotten, "kept": reasons})
    elif jobs:
        print(f"removed {plural(len(forgotten), 'job')}")
    for why in kept.values():
        print(f"holdfast: {why}", file=sys.stderr)
    return _KEPT if kept else 0


def _choose(args: argparse.Namespace) -> list[Job]:
    """Return the chosen jobs, oldest first.

    Raises:
        NotFound: a job does not exist.
    """
    named = [find_engine(number).job(number) for number in dict.fromkeys(args.ids)]
    if args.ended_before is None and not args.all_ended:
        return named
    before_s = time.time()
    if args.ended_before is not None:
        before_s -= parse_duration(args.ended_before, "--ended-before")
    found = {job.id: job for job in named}
    for job in get_engine(args.on).jobs() if args.on else all_jobs():
        if job.status.is_final and (job.ended_unix_s is None or job.ended_unix_s <= before_s):
            found[job.id] = job
    return sorted(found.values(), key=lambda job: job.id)


def _forget(jobs: list[Job], *, force: bool) -> tuple[list[int], dict[int, str]]:
    forgotten: list[int] = []
    kept: dict[int, str] = {}
    for job in jobs:
        try:
            get_engine(job.engine).forget(job.id, force=force)
        except Conflict as error:
            kept[job.id] = str(error)
        else:
            forgotten.append(job.id)
    return forgotten, kept


def _print(jobs: list[Job]) -> None:
    if not jobs:
        print("no jobs")
        return
    rows = [(str(job.id), job.name, job.status.value, format_age(job.ended_unix_s)) for job in jobs]
    print_table(("ID", "NAME", "STATUS", "ENDED"), rows, right=("ID",), names=("NAME",))
