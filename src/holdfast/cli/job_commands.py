"""Commands for jobs that exist: their list, their end, and the nodes of all of them."""

from __future__ import annotations

import argparse
import time
from operator import attrgetter

from holdfast.cli import FOUND, print_note, tables
from holdfast.cli.commands import argument, command, either, repeated, step_number
from holdfast.cli.jobs import JOB, engine_option, format_span, job_row, print_errors
from holdfast.cli.tables import Column
from holdfast.errors import HoldfastError, InvalidInput
from holdfast.jobs.description import durations_of
from holdfast.jobs.engine import Job, each, sorted_out
from holdfast.jobs.folder import state_dir
from holdfast.jobs.interface import cancel_each, clear_node, find, job, queue, wait_each
from holdfast.jobs.interface import nodes as node_standings
from holdfast.jobs.machines import NodeStanding
from holdfast.jobs.records import Records
from holdfast.jobs.registry import all_jobs, get_engine
from holdfast.jobs.status import JobStatus
from holdfast.system.documents import to_plain
from holdfast.system.units import format_duration, parse_duration, plural

_SHOWN = 20


@command(
    "queue",
    """
    holdfast queue
    holdfast queue --status failed --all
    holdfast queue --json | jq '.[] | select(.status == "RUNNING") | .id'
    """,
    repeated("--status S", f"only jobs with this status, such as {JobStatus.FAILED.value}"),
    either(
        argument("--all", "also list all jobs that have ended"),
        argument("--tail K", f"of those that have ended, only the newest K (default: {_SHOWN})", step_number),
    ),
    engine_option(default=None, shown="all"),
    details=(
        "Jobs that have not ended are always listed, and first. TOTAL is the time since the submission, "
        "RUNNING with the run command started, DOWN between two attempts; REC counts recoveries, and ON "
        "has the id of the job there. Controllers that have died are started again."
    ),
)
def list_jobs(args: argparse.Namespace) -> None:
    """List the jobs: those that have not ended, then the others, each newest first."""
    jobs = queue(on=args.on, statuses=args.status)
    for message in Records(state_dir()).unreadable():
        print_note(message)
    active = [job for job in jobs if not job.status.is_final]
    ended = jobs[len(active) :]
    is_whole = args.all or (args.json and args.tail is None)
    shown = active + (ended if is_whole else ended[: _SHOWN if args.tail is None else args.tail])
    if args.json:
        tables.print_json([job_row(job) for job in shown])
    elif not jobs:
        print("no jobs")
    else:
        tables.print_table(_JOB_COLUMNS, [(job, durations_of(job)) for job in shown])
        # The row has the first line only: this is the same for all jobs of an engine that does not answer.
        for reason in dict.fromkeys(job.reason for job in active if "\n" in job.reason):
            print_note(f"{' '.join(reason.replace(chr(10), ': ', 1).split())}")
        if left := len(jobs) - len(shown):
            print(f"{plural(left, 'older job')} not shown; use --all or --tail K to show more")


_JOB_COLUMNS = (  # of a job and its durations
    Column("ID", lambda row: row[0].id, "right"),
    Column("NAME", lambda row: row[0].name, "name"),
    Column("STATUS", lambda row: row[0].status.value),
    Column("TOTAL", lambda row: format_span(row[1].total_s), "right", spare=2),
    Column("RUNNING", lambda row: format_span(row[1].running_s), "right"),
    Column("DOWN", lambda row: format_span(row[1].down_s), "right"),
    Column("REC", lambda row: row[0].recoveries, "right"),
    Column("STEP", lambda row: row[0].step, "right", spare=3),
    Column("NODES", lambda row: row[0].num_nodes, "right", spare=1),
    Column("ON", lambda row: f"{row[0].engine} {row[0].engine_job_id or ''}".rstrip(), spare=4),
    Column("WHY", lambda row: row[0].reason.partition("\n")[0], "text"),
)


@command(
    "wait",
    """
    holdfast wait 3 && echo "it has succeeded"
    holdfast wait 3 4 sweep --timeout 2h
    """,
    argument("jobs JOB", "number of a job, or the name of jobs", nargs="+"),
    argument("--timeout T", "longest time to wait, such as 2h (default: no limit)"),
    details=(
        "Each is printed when it ends. The exit status is 0 if all have succeeded. Otherwise it is that of "
        "the oldest that has not: the status of its run command, or 1 if it was cancelled. It is 2 if one "
        "does not exist or does not end in time; the others are waited for."
    ),
)
def wait(args: argparse.Namespace) -> int:
    """Wait, and report how the jobs have ended."""
    jobs: list[Job] = []
    status = 0
    for ended in wait_each(*args.jobs, timeout=args.timeout):
        if isinstance(ended, HoldfastError):
            status = print_errors([ended])
            continue
        jobs.append(ended)
        if not args.json:
            reason = ended.reason.partition("\n")[0]
            why = f": {reason}" if reason else ""
            print(f"job {ended.id} ({ended.name}) is {ended.status.value}{why}", flush=True)
    jobs.sort(key=lambda job: job.id)
    if args.json:
        tables.print_json([job_row(job) for job in jobs])
    return status or next((job.exit_status for job in jobs if job.exit_status), 0)


@command(
    "cancel",
    """
    holdfast cancel 3
    holdfast cancel 3 4 sweep
    holdfast cancel --all
    """,
    argument("jobs JOB", "number of a job, or the name of jobs that have not ended", nargs="*"),
    argument("--all", "all jobs that have not ended"),
    details=(
        "Each has 30 s (on Slurm 60 s) to save, then it is killed. If some cannot be cancelled, all others "
        "are, and the exit status is 2."
    ),
)
def cancel(args: argparse.Namespace) -> int:
    """Request the cancellations. The jobs end in the background."""
    if bool(args.jobs) == args.all:
        raise InvalidInput("Choose jobs by number or name, or all with --all. Nothing was cancelled.")
    found, errors = sorted_out(cancel_each(*args.jobs, every=args.all))
    ended = {True: "was", False: "is being"}
    lines = [f"job {job.id} ({job.name}) {ended[job.status.is_final]} cancelled" for job in found]
    if args.json or lines or not errors:
        tables.print_result(args, [job_row(job) for job in found], "\n".join(lines) or "no jobs")
    return print_errors(errors)


@command(
    "preempt",
    """
    holdfast preempt 3
    holdfast preempt 3 --lead 2m
    holdfast preempt bert --lead 0
    """,
    JOB,
    argument("--lead T", "time between notice and kill, such as 30s or 2m", default="30s"),
    details="The job receives a notice now. After the lead, all its processes are killed; then it restarts.",
)
def preempt(args: argparse.Namespace) -> None:
    """Send the notice. The processes are killed in the background."""
    try:
        lead_s = float(args.lead)
    except ValueError:
        lead_s = parse_duration(args.lead, "--lead")
    if not 0 <= lead_s < float("inf"):
        raise InvalidInput(f"--lead must be a duration such as 30s, or 0, got {args.lead!r}.")
    found = job(args.job)
    preempted = get_engine(found.engine).preempt(found.id, lead_s=lead_s)
    when = f"its processes are killed in {format_duration(lead_s)}"
    tables.print_result(args, job_row(preempted), f"job {found.id} ({found.name}) is preempted; {when}")


@command(
    "forget",
    """
    holdfast forget 3 4 sweep
    holdfast forget --ended-before 30d
    holdfast forget --all-ended --yes
    """,
    argument("jobs JOB", "number of a job, or the name of jobs", nargs="*"),
    argument("--ended-before T", "jobs that ended longer ago than this, such as 30d"),
    argument("--all-ended", "all jobs that have ended"),
    argument("--force", "also remove jobs with files that are not in their bucket yet"),
    argument("--dry-run", "only list what would be removed"),
    argument("--yes, -y", "do not ask; required without a terminal"),
    engine_option(default=None, shown="all"),
    details="Buckets are not touched.",
)
def forget(args: argparse.Namespace) -> int:
    """Remove the jobs, after asking on the terminal."""
    if not args.jobs and args.ended_before is None and not args.all_ended:
        raise InvalidInput("Choose jobs: JOB, --ended-before T or --all-ended. Nothing was removed.")
    jobs, errors = _chosen_to_forget(args)
    forgotten: list[int] = []
    kept: dict[int, HoldfastError] = {}
    texts = {"nothing": "no jobs", "question": "remove these jobs?", "refusal": "Nothing was removed."}
    for ended in jobs if tables.may_remove(args, _FORGOTTEN_COLUMNS, jobs, **texts) else ():
        try:
            get_engine(ended.engine).forget(ended.id, force=args.force)
            forgotten.append(ended.id)
        except HoldfastError as error:
            kept[ended.id] = error
    if args.json:
        reasons = [{"id": number, "why": str(why)} for number, why in kept.items()]
        tables.print_json({"chosen": [job.id for job in jobs], "forgotten": forgotten, "kept": reasons})
    elif jobs:
        print(f"removed {plural(len(forgotten), 'job')}")
    status = print_errors([*kept.values(), *errors])
    return FOUND if kept else status


_FORGOTTEN_COLUMNS = (
    Column("ID", attrgetter("id"), "right"),
    Column("NAME", attrgetter("name"), "name"),
    Column("STATUS", attrgetter("status.value")),
    Column("ENDED", lambda job: tables.format_age(job.ended_unix_s)),
)


def _chosen_to_forget(args: argparse.Namespace) -> tuple[list[Job], list[HoldfastError]]:
    named, errors = sorted_out(each(find, args.jobs))
    found = {job.id: job for jobs in named for job in jobs}
    if args.ended_before is None and not args.all_ended:
        return list(found.values()), errors
    before_s = time.time()
    if args.ended_before is not None:
        before_s -= parse_duration(args.ended_before, "--ended-before")
    for known in get_engine(args.on).jobs() if args.on else all_jobs():
        if known.status.is_final and (known.ended_unix_s is None or known.ended_unix_s <= before_s):
            found[known.id] = known
    return sorted(found.values(), key=lambda job: job.id), errors


@command(
    "nodes",
    """
    holdfast nodes
    holdfast nodes --json | jq -r '.[] | select(.stands_out) | .name'
    holdfast nodes --clear gpu-17
    """,
    repeated("--clear NAME", "forget what is recorded about a node, so that jobs use it again"),
    details=(
        "A node stands out if it has lost attempts so often that chance does not explain it, or if a check "
        "on it returned a wrong result. On Slurm, new attempts leave such nodes out. "
        "CHECKS counts failed checks; CHANCE is the probability that some node loses this many attempts "
        "by chance. Events expire after 30 days."
    ),
)
def nodes(args: argparse.Namespace) -> int:
    """List the nodes, or clear some."""
    results = list(each(clear_node, args.clear))
    found = node_standings()
    if args.json:
        tables.print_json([to_plain(one) for one in found])
    elif args.clear:
        cleared = [name for name, error in zip(args.clear, results, strict=True) if error is None]
        print(f"cleared: {', '.join(cleared) or 'no node'}")
    elif found:
        tables.print_table(_NODE_COLUMNS, found)
    else:
        print("no attempts in the last 30 days")
    return print_errors(one for one in results if one is not None)


def _chance(node: NodeStanding) -> str | None:
    if not node.lost:
        return None
    return f"{node.chance:.3f}" if node.chance >= 0.001 else "<0.001"


_NODE_COLUMNS = (
    Column("NODE", attrgetter("name"), "name"),
    Column("ATTEMPTS", attrgetter("attempts"), "right"),
    Column("LOST", attrgetter("lost"), "right"),
    Column("CHECKS", lambda node: sum(node.failed_checks.values()), "right"),
    Column("CHANCE", _chance, "right", spare=2),
    Column("STANDS OUT", lambda node: "yes" if node.stands_out else "no"),
    Column("LAST TROUBLE", lambda node: node.lost_unix_s and tables.format_time(node.lost_unix_s), spare=1),
    Column("WHY", lambda node: "; ".join(node.reasons), "text"),
)
