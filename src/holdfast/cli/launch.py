"""`holdfast launch`: runs a SkyPilot task file as a job."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from holdfast.cli.jobs import add_engine, job_row, print_line
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json, print_table
from holdfast.errors import InvalidInput, RetryLater
from holdfast.jobs.engine import Engine, Job, UnsupportedKey
from holdfast.jobs.registry import get_engine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import Task
from holdfast.restore.atomic_output import atomic_file
from holdfast.units import plural

_EXAMPLES = """
holdfast launch task.yaml
holdfast launch task.yaml --name try-2 --env LR=3e-4 --attach
holdfast launch task.yaml --dry-run
holdfast launch task.yaml --on k8s --dry-run -o job.yaml
"""
_FAILED = 1


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "launch", run, examples=_EXAMPLES)
    parser.add_argument("task", metavar="TASK", help="YAML file in SkyPilot's format")
    parser.add_argument("--name", "-n", metavar="NAME", help="name of the job (default: from the file)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable of envs; K alone copies it from this environment; can be repeated",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable of secrets, in the same way; its value is never shown",
    )
    add_engine(parser, default="local", shown="local, this machine")
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
    from holdfast.jobs.task.parser import Overrides, load_task

    engine = get_engine(args.on)
    overrides = Overrides(args.name, _variables(args.env, "--env"), _variables(args.secret, "--secret"))
    task = load_task(args.task, overrides)
    if args.output is not None and not args.dry_run:
        raise InvalidInput("-o is for --dry-run: it writes what would be submitted. Nothing was started.")
    if args.dry_run:
        engine.check(task)
        if args.output is None:
            _show_plan(task, engine, args)
        else:
            _write_rendered(task, engine, args.output)
        return 0
    for note in task.notes:
        print(f"holdfast: {note}", file=sys.stderr)
    job = engine.submit(task)
    if not args.attach:
        _show_job(job, args)
        return 0
    return _attach(engine, job, args)


def _variables(words: Iterable[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            if name not in os.environ:
                raise InvalidInput(f"{option} {name}: expected {name}=VALUE, or a variable that is set here.")
            value = os.environ[name]
        found[name] = value
    return found


def _show_job(job: Job, args: argparse.Namespace) -> None:
    if args.json:
        print_json(job_row(job))
        return
    print(f"job {job.id} ({job.name}) was submitted and runs in the background")
    print(f"to see its output: holdfast logs {job.id} -f")


def _attach(engine: Engine, job: Job, args: argparse.Namespace) -> int:
    if not args.json:
        print(f"job {job.id} ({job.name}); Ctrl-C does not stop it", file=sys.stderr)
    try:
        for line in engine.lines(job.id, follow=True, with_changes=True):
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


# -- plan -----------------------------------------------------------------------------------


def _show_plan(task: Task, engine: Engine, args: argparse.Namespace) -> None:
    from holdfast.jobs.task.rendering import to_yaml

    unsupported = engine.unsupported_keys(task)
    if args.json:
        keys = [{"key": one.key, "line": one.line, "what": one.what} for one in unsupported]
        print_json(
            {
                "name": task.name,
                "engine": engine.name,
                "num_nodes": task.num_nodes,
                "notes": list(task.notes),
                "unsupported_keys": keys,
                "rendered": engine.render(task),
                "task": to_yaml(task),
            }
        )
        return
    print_table(("WHAT", "HOW"), list(_rows(task, engine)), text="HOW")
    _print_effects(unsupported, engine)
    for note in task.notes:
        print(f"note: {note}")
    for number, line in enumerate(engine.render(task)):
        print(f"    {line}" if number else f"\nsubmitted to {engine.name}:\n    {line}")
    print("nothing was started")


def _write_rendered(task: Task, engine: Engine, output: str) -> None:
    """Write the submission to a file, and the rest of the plan to stderr.

    Raises:
        InvalidInput: the engine submits nothing to another system, or the file cannot be written.
    """
    lines = engine.render(task)[1:]  # without the command line
    if not lines:
        raise InvalidInput(f"-o: {engine.name} submits nothing to another system. Nothing was written.")
    for one in engine.unsupported_keys(task):
        print(f"holdfast: line {one.line}: {one.key}: {one.what}", file=sys.stderr)
    for note in task.notes:
        print(f"holdfast: {note}", file=sys.stderr)
    text = "".join(f"{line}\n" for line in lines)
    if output == "-":
        sys.stdout.write(text)
        return
    try:
        with atomic_file(Path(output), overwrite=True) as partial:
            partial.write_text(text, encoding="utf-8")
    except (InvalidInput, RetryLater) as error:
        raise InvalidInput(f"Cannot write {output}: {error}") from error
    print(f"{output} was written, and nothing was started")


def _rows(task: Task, engine: Engine) -> Iterable[tuple[str, str]]:
    yield "job", f"{task.name}, on {engine.name}"
    yield "nodes", str(task.num_nodes)
    yield "workdir", _format_workdir(task)
    for mount in task.file_mounts:
        yield "mount", f"{mount.target}: {mount.mode.value} of {mount.source or mount.bucket}"
    yield "setup", f"{plural(len(task.setup.splitlines()), 'line')}" if task.setup else "none"
    yield "run", f"{plural(len(task.run.splitlines()), 'line')}"
    if task.envs:
        yield "envs", ", ".join(f"{name}={value}" for name, value in task.envs.items())
    if task.secrets:
        yield "secrets", ", ".join(task.secrets)
    codes = ", ".join(map(str, sorted(task.recovery.free_codes)))
    free = f" and exit status {codes}" if codes else ""
    errors = f"{plural(task.recovery.max_restarts, 'restart')} after other errors"
    yield "recovery", f"unlimited restarts after preemptions, lost nodes{free}; {errors}"


def _format_workdir(task: Task) -> str:
    if task.repository is not None:
        at = f" at {task.repository.ref}" if task.repository.ref else ""
        # As in the file: the task has the values of secrets in its place.
        return f"cloned from {task.document['workdir']['url']}{at}"
    return f"copied from {task.workdir}" if task.workdir else "empty"


def _print_effects(unsupported: list[UnsupportedKey], engine: Engine) -> None:
    if unsupported:
        print(f"\nkeys with another meaning on {engine.name}:")
        rows = [(str(one.line), one.key, one.what) for one in unsupported]
        print_table(("LINE", "KEY", "HERE"), rows, names=("KEY",), text="HERE")
