"""`holdfast launch`: runs a SkyPilot task file or a command as a job."""

from __future__ import annotations

import argparse
import sys

from holdfast.cli.jobs import add_engine, job_row, print_line
from holdfast.cli.launch_plan import show_plan, write_rendered
from holdfast.cli.launch_task import add_task, read_tasks
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import InvalidInput
from holdfast.jobs.engine import Engine, Job
from holdfast.jobs.notifications.launching import with_subscription
from holdfast.jobs.output.block import OutputSelection
from holdfast.jobs.registry import get_engine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import TaskFile

_EXAMPLES = """
holdfast launch task.yaml
holdfast launch task.yaml --name try-2 --env LR=3e-4 --attach
holdfast launch task.yaml --env-file .env --gpus A100:8 --num-nodes 2
holdfast launch --name sweep-1 -- python train.py --lr 3e-4
holdfast launch task.yaml --notify ~/bin/on-status --notify-on ended,recovering,running
holdfast launch task.yaml --dry-run
holdfast launch task.yaml --on k8s --dry-run -o job.yaml
"""
_FAILED = 1


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "launch", run, examples=_EXAMPLES)
    add_task(parser)
    add_engine(parser, default="local", shown="local, this machine")
    parser.add_argument(
        "--notify",
        action="append",
        metavar="COMMAND|URL",
        help="shell command or http(s) URL that is notified of new statuses; can be repeated (default: the "
        "lines of HOLDFAST_NOTIFY; use it for secret URLs, which ps would show)",
    )
    parser.add_argument(
        "--notify-on",
        metavar="S,...",
        help="statuses to notify of, such as running; ended means all final ones, failed all failures "
        "(default: HOLDFAST_NOTIFY_ON, or ended,recovering)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan without starting anything")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="with --dry-run: write what would be submitted to FILE (- for standard output)",
    )
    parser.add_argument(
        "--attach",
        action="store_true",
        help="print the output until the job has ended; Ctrl-C does not stop the job",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Submit the job, or show its plan."""
    engine = get_engine(args.on)
    statuses = None if args.notify_on is None else [args.notify_on]
    file = with_subscription(read_tasks(args), engine, args.notify, statuses)
    if args.output is not None and not args.dry_run:
        raise InvalidInput("-o is for --dry-run: it writes what would be submitted. Nothing was started.")
    if args.dry_run:
        engine.check_file(file)
        if args.output is None:
            show_plan(file, engine, args)
        else:
            write_rendered(file, engine, args.output)
        return 0
    for note in (note for task in file.tasks for note in task.notes):
        print(f"holdfast: {note}", file=sys.stderr)
    jobs = engine.submit_file(file)
    if args.attach:
        # The jobs after one that has failed are cancelled.
        return next((status for job in jobs if (status := _attach(engine, job, args))), 0)
    if file.is_pipeline:
        _show_pipeline(file, jobs, args)
    else:
        _show_job(jobs[0], args)
    return 0


def _show_job(job: Job, args: argparse.Namespace) -> None:
    if args.json:
        print_json(job_row(job))
        return
    if job.status is JobStatus.PENDING and job.reason:
        print(f"job {job.id} ({job.name}) was submitted and starts in the background: it {job.reason}")
    else:
        print(f"job {job.id} ({job.name}) was submitted and runs in the background")
    print(f"to see its output: holdfast logs {job.id} -f")


def _show_pipeline(file: TaskFile, jobs: list[Job], args: argparse.Namespace) -> None:
    if args.json:
        print_json([job_row(job) for job in jobs])
        return
    names = ", ".join(f"{job.id} ({job.name})" for job in jobs)
    print(f"pipeline {file.name} was submitted and runs in the background, one job after the other: {names}")
    print(f"to see the output of the first: holdfast logs {jobs[0].id} -f")


def _attach(engine: Engine, job: Job, args: argparse.Namespace) -> int:
    if not args.json:
        print(f"job {job.id} ({job.name}); Ctrl-C does not stop it", file=sys.stderr)
    try:
        for line in engine.lines(job.id, OutputSelection(follow=True, with_changes=True)):
            print_line(line, job.num_nodes, is_json=args.json)
    except KeyboardInterrupt:
        print(
            f"\nholdfast: job {job.id} is still running; to see its output: holdfast logs {job.id} -f",
            file=sys.stderr,
        )
        return 0
    ended = engine.job(job.id)
    if args.json:
        print_json(job_row(ended))
    else:
        reason = f": {ended.reason}" if ended.reason else ""
        print(f"holdfast: job {job.id} is {ended.status.value}{reason}", file=sys.stderr)
    return 0 if ended.status is JobStatus.SUCCEEDED else _FAILED
