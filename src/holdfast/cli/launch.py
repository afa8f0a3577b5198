"""`holdfast launch`: runs a SkyPilot task file or a command as a job."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from holdfast.cli import FOUND, print_note
from holdfast.cli.commands import argument, command, count, repeated
from holdfast.cli.jobs import engine_option, job_row
from holdfast.cli.logs import print_output
from holdfast.cli.tables import Column, print_json, print_result, print_table, write_output
from holdfast.errors import InvalidInput, NotFound
from holdfast.jobs.engine import Job
from holdfast.jobs.output import OutputSelection
from holdfast.jobs.recorded import RecordedEngine
from holdfast.jobs.registry import get_engine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.document import is_variable_name
from holdfast.jobs.task.model import Task, TaskFile
from holdfast.jobs.task.problems import MAX_PRIORITY
from holdfast.system.documents import decode_text, to_plain
from holdfast.system.units import plural
from holdfast.watch.standby.start.sitecustomize import STANDBY


def show_plan(file: TaskFile, engine: RecordedEngine, args: argparse.Namespace) -> None:
    """Print the plan of each task, and the keys with another meaning."""
    if args.json:
        plans = [_plan(task, engine) for task in file.tasks]
        print_json(plans if file.is_pipeline else plans[0])
        return
    for number, task in enumerate(file.tasks, 1):
        if file.is_pipeline:
            after = " once the one before has succeeded" if number > 1 else ""
            print(f"task {number} of {len(file.tasks)} of pipeline {file.name}{after}")
        _print_plan(task, engine)
        if number < len(file.tasks):
            print()
    print("nothing was started")


def _plan(task: Task, engine: RecordedEngine) -> dict[str, Any]:
    from holdfast.jobs.task.document import to_yaml

    return {
        "name": task.name,
        "engine": engine.name,
        "num_nodes": task.num_nodes,
        "notes": list(task.notes),
        "unsupported_keys": [to_plain(one) for one in engine.unsupported_keys(task)],
        "rendered": engine.render(task),
        "task": to_yaml(task),
    }


def _print_plan(task: Task, engine: RecordedEngine) -> None:
    print_table((Column("WHAT", itemgetter(0)), Column("HOW", itemgetter(1), "text")), _rows(task, engine))
    if unsupported := engine.unsupported_keys(task):
        print(f"\nkeys with another meaning on {engine.name}:")
        line = Column("LINE", lambda row: row.line or None)
        key, what = Column("KEY", attrgetter("key"), "name"), Column("HERE", attrgetter("what"), "text")
        print_table((line, key, what), unsupported)
    for note in task.notes:
        print(f"note: {note}")
    for number, line in enumerate(engine.render(task)):
        print(f"    {line}" if number else f"\nsubmitted to {engine.name}:\n    {line}")


def write_rendered(file: TaskFile, engine: RecordedEngine, output: str) -> None:
    """Write the submission to a file, and the rest of the plan to stderr."""
    task = file.tasks[0]  # an engine that submits to another system runs no pipelines
    lines = engine.render(task)[1:]  # without the command line
    if not lines:
        raise InvalidInput(f"-o: {engine.name} submits nothing to another system. Nothing was written.")
    for row in engine.unsupported_keys(task):
        line = f"line {row.line}: " if row.line else ""  # not in the file: an option of the command line
        print_note(f"{line}{row.key}: {row.what}")
    for note in task.notes:
        print_note(note)
    text = "".join(f"{line}\n" for line in lines)
    if output == "-":
        sys.stdout.write(text)
        return
    write_output(output, text, "")
    print(f"{output} was written, and nothing was started")


def _rows(task: Task, engine: RecordedEngine) -> Iterable[tuple[str, str]]:
    yield "job", f"{task.name}, on {engine.name}"
    yield "nodes", str(task.num_nodes)
    if task.repository is not None:
        at = f" at {task.repository.ref}" if task.repository.ref else ""
        # As in the file: the task has the values of secrets in its place.
        yield "workdir", f"cloned from {task.document['workdir']['url']}{at}"
    else:
        yield "workdir", f"copied from {task.workdir}" if task.workdir else "empty"
    if engine.is_here and task.image is None:
        path = task.envs.get("PATH")
        found = shutil.which("python3", path=path) or shutil.which("python", path=path)
        yield "python", f"{found}, the first on the PATH" if found else "none on the PATH"
    for mount in task.file_mounts:
        yield "mount", f"{mount.target}: {mount.mode.value} of {mount.source or mount.bucket}"
    yield "setup", f"{plural(len(task.setup.splitlines()), 'line')}" if task.setup else "none"
    yield "run", f"{plural(len(task.run.splitlines()), 'line')}"
    if task.envs:
        yield "envs", ", ".join(f"{name}={value}" for name, value in task.envs.items())
    if task.secrets:
        yield "secrets", ", ".join(task.secrets)
    if task.subscription.targets:
        statuses = ", ".join(sorted(one.value for one in task.subscription.statuses))
        yield "notifications", f"{plural(len(task.subscription.targets), 'target')}, of {statuses}"
    codes = ", ".join(map(str, sorted(task.recovery.free_codes)))
    free = f" and exit status {codes}" if codes else ""
    errors = f"{plural(task.recovery.max_restarts, 'restart')} after other errors"
    yield "recovery", f"unlimited restarts after preemptions, lost nodes{free}; {errors}"


def _priority(text: str) -> int:
    number = int(text)
    if abs(number) > MAX_PRIORITY:
        raise ValueError
    return number


_TASK = (
    argument("task TASK", "YAML file in SkyPilot's format", nargs="?"),
    argument("args COMMAND", "after --, in place of a file: a command and its arguments", nargs="*"),
    argument("--name, -n NAME", "name of the job (default: from the file)"),
    repeated("--env K=V", "set a variable of envs; K alone copies it from this environment"),
    argument("--env-file FILE", "set variables from a file with one K=V per line; --env overrides them"),
    repeated("--secret K=V", "set a variable of secrets, as --env does; its value is never shown"),
    argument(
        "--gpus NAME:N", "GPUs per node, such as A100:8, which replace all accelerators of the file; or none"
    ),
    argument("--num-nodes N", "number of nodes", count),
    argument(
        "--priority N",
        "priority: if several jobs wait for GPUs, CPUs or memory here, the greatest starts first: "
        f"{-MAX_PRIORITY} to {MAX_PRIORITY} (default: 0)",
        _priority,
    ),
    argument("--workdir FOLDER", "folder to copy as the workdir (default for a command: the current one)"),
)
"""TASK, and the options that override its keys, with the names that `sky launch` uses."""


@command(
    "launch",
    """
    holdfast launch task.yaml
    holdfast launch task.yaml --name try-2 --env LR=3e-4 --attach
    holdfast launch task.yaml --env-file .env --gpus A100:8 --num-nodes 2
    holdfast launch --name sweep-1 -- python train.py --lr 3e-4
    holdfast launch task.yaml --notify ~/bin/on-status --notify-on ended,recovering,running
    holdfast launch task.yaml --dry-run
    holdfast launch task.yaml --on k8s --dry-run -o job.yaml
    """,
    *_TASK,
    engine_option(default="local", shown="local, this machine"),
    argument(
        "--notify COMMAND|URL",
        "shell command or http(s) URL that is notified of new statuses; can be repeated (default: the "
        "lines of HOLDFAST_NOTIFY; use it for secret URLs, which ps would show)",
        action="append",
    ),
    argument(
        "--notify-on S,...",
        "statuses to notify of, such as running; ended means all final ones, failed all failures "
        "(default: HOLDFAST_NOTIFY_ON, or ended,recovering)",
    ),
    argument(
        "--standby",
        "keep a process on each node that has imported what the training script imports, from which the "
        "next attempt begins; see `holdfast standby --help`",
    ),
    argument("--dry-run", "show the plan without starting anything"),
    argument(
        "-o, --output FILE", "with --dry-run: write what would be submitted to FILE (- for standard output)"
    ),
    argument("--attach", "print the output until the job has ended; Ctrl-C does not stop the job"),
)
def run(args: argparse.Namespace) -> int:
    """Submit the job, or show its plan."""
    engine = get_engine(args.on)
    args.env += [f"{STANDBY}=1"] if args.standby else []
    statuses = None if args.notify_on is None else [args.notify_on]
    file = engine.subscribed(read_tasks(args), args.notify, statuses)
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
        print_note(note)
    jobs = engine.submit_file(file)
    if args.attach:
        # The jobs after one that has failed are cancelled.
        return next((status for job in jobs if (status := _attach(engine, job, args))), 0)
    _show_jobs(file, jobs, args)
    return 0


def _show_jobs(file: TaskFile, jobs: list[Job], args: argparse.Namespace) -> None:
    job, rows = jobs[0], [job_row(job) for job in jobs]
    which, how = f"job {job.id} ({job.name})", "runs in the background"
    if file.is_pipeline:
        names = ", ".join(f"{job.id} ({job.name})" for job in jobs)
        which, how = f"pipeline {file.name}", f"{how}, one job after the other: {names}"
    elif job.status is JobStatus.PENDING and job.reason:
        how = f"starts in the background: it {job.reason}"
    whose = "the output of the first" if file.is_pipeline else "its output"
    text = f"{which} was submitted and {how}\nto see {whose}: holdfast logs {job.id} -f"
    print_result(args, rows if file.is_pipeline else rows[0], text)


def _attach(engine: RecordedEngine, job: Job, args: argparse.Namespace) -> int:
    if not args.json:
        print(f"job {job.id} ({job.name}); Ctrl-C does not stop it", file=sys.stderr)
    try:
        wanted = OutputSelection(follow=True, is_timed=True, with_changes=True)
        print_output(job, wanted, is_json=args.json)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        print_note(f"job {job.id} is still running; to see its output: holdfast logs {job.id} -f")
        return 0
    ended = engine.job(job.id)
    if args.json:
        print_json(job_row(ended))
    else:
        reason = f": {ended.reason}" if ended.reason else ""
        print_note(f"job {job.id} is {ended.status.value}{reason}")
    return 0 if ended.status is JobStatus.SUCCEEDED else FOUND


def read_tasks(args: argparse.Namespace) -> TaskFile:
    """Return the task of a command line, or the tasks of a pipeline."""
    from holdfast.jobs.task.model import parse_accelerators
    from holdfast.jobs.task.parser import Overrides, command_task, load_tasks

    gpus, workdir, words = args.gpus, args.workdir, args.command_line
    if gpus is not None and isinstance(read := parse_accelerators(gpus), str):
        raise InvalidInput(f"--gpus {gpus}: {read}. Nothing was started.")
    if workdir is not None and not Path(workdir).expanduser().is_dir():
        raise NotFound(
            f"--workdir: the folder {workdir} does not exist. For a git repository, use `workdir: "
            "{url: ..., ref: ...}` in a task file. Nothing was started."
        )
    envs = {**_file_variables(args.env_file), **_variables(args.env, "--env")}
    secrets = _variables(args.secret, "--secret")
    overrides = Overrides(args.name, envs, secrets, gpus, args.num_nodes, workdir, args.priority)
    if (args.task is None) == (not words) or args.args:
        raise InvalidInput(
            "Expected a task file, or -- and a command, as in `holdfast launch -- python train.py`. Nothing "
            "was started."
        )
    if not words:
        return load_tasks(args.task, overrides)
    here = Path.cwd()
    if workdir is None and (here == Path.home() or here.parent == here):  # copied by mistake
        raise InvalidInput(
            f"A command runs in a copy of the current folder, which is {here}. Change to the folder of the "
            "training, or give --workdir FOLDER. Nothing was started."
        )
    # One word is text for the shell, such as 'a && b'. Several are a program and its arguments.
    return command_task(words[0] if len(words) == 1 else shlex.join(words), overrides)


def _file_variables(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    from holdfast.jobs.task.env_file import parse_env_file

    try:
        text = decode_text(Path(path).expanduser().read_bytes(), f"--env-file: {path}")
    except FileNotFoundError as error:
        raise NotFound(f"--env-file: {path} does not exist. Nothing was started.") from error
    except OSError as error:
        raise InvalidInput(f"--env-file: cannot read {path}: {error}. Nothing was started.") from error
    return parse_env_file(text, path, os.environ)


def _variables(words: Iterable[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not is_variable_name(name):
            what = f"expected NAME=VALUE with the name of a variable, found {name!r:.100}"
            raise InvalidInput(f"{option} {word:.100}: {what}.")
        if not equals:
            if name not in os.environ:
                raise InvalidInput(f"{option} {name}: expected {name}=VALUE, or a variable that is set here.")
            value = os.environ[name]
        found[name] = value
    return found
