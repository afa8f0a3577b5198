"""The plan of a job, as `holdfast launch --dry-run` shows it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.cli.tables import print_json, print_table
from holdfast.errors import InvalidInput, RetryLater
from holdfast.jobs.engine import Engine, UnsupportedKey
from holdfast.jobs.task.model import Task, TaskFile
from holdfast.system.units import plural


def show_plan(file: TaskFile, engine: Engine, args: argparse.Namespace) -> None:
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


def _plan(task: Task, engine: Engine) -> dict[str, Any]:
    from holdfast.jobs.task.document import to_yaml

    unsupported = engine.unsupported_keys(task)
    return {
        "name": task.name,
        "engine": engine.name,
        "num_nodes": task.num_nodes,
        "notes": list(task.notes),
        "unsupported_keys": [{"key": one.key, "line": one.line, "what": one.what} for one in unsupported],
        "rendered": engine.render(task),
        "task": to_yaml(task),
    }


def _print_plan(task: Task, engine: Engine) -> None:
    print_table(("WHAT", "HOW"), list(_rows(task, engine)), text="HOW")
    _print_effects(engine.unsupported_keys(task), engine)
    for note in task.notes:
        print(f"note: {note}")
    for number, line in enumerate(engine.render(task)):
        print(f"    {line}" if number else f"\nsubmitted to {engine.name}:\n    {line}")


def write_rendered(file: TaskFile, engine: Engine, output: str) -> None:
    """Write the submission to a file, and the rest of the plan to stderr.

    Raises:
        InvalidInput: the engine submits nothing to another system, or the file cannot be written.
    """
    task = file.tasks[0]  # an engine that submits to another system runs no pipelines
    lines = engine.render(task)[1:]  # without the command line
    if not lines:
        raise InvalidInput(f"-o: {engine.name} submits nothing to another system. Nothing was written.")
    for one in engine.unsupported_keys(task):
        line = f"line {one.line}: " if one.line else ""  # not in the file: an option of the command line
        print(f"holdfast: {line}{one.key}: {one.what}", file=sys.stderr)
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
    if engine.is_here and task.image is None:
        yield "python", _format_python(task)
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


def _format_python(task: Task) -> str:
    path = task.envs.get("PATH")
    found = shutil.which("python3", path=path) or shutil.which("python", path=path)
    return f"{found}, the first on the PATH" if found else "none on the PATH"


def _format_workdir(task: Task) -> str:
    if task.repository is not None:
        at = f" at {task.repository.ref}" if task.repository.ref else ""
        # As in the file: the task has the values of secrets in its place.
        return f"cloned from {task.document['workdir']['url']}{at}"
    return f"copied from {task.workdir}" if task.workdir else "empty"


def _print_effects(unsupported: list[UnsupportedKey], engine: Engine) -> None:
    if unsupported:
        print(f"\nkeys with another meaning on {engine.name}:")
        rows = [(str(one.line or "-"), one.key, one.what) for one in unsupported]
        print_table(("LINE", "KEY", "HERE"), rows, names=("KEY",), text="HERE")
