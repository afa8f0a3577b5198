"""The task of `holdfast launch`: a file or a command, and the options that override its keys."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from holdfast.cli.options import count
from holdfast.errors import InvalidInput, NotFound
from holdfast.jobs.task.edits import is_variable_name
from holdfast.jobs.task.model import TaskFile
from holdfast.jobs.task.problems import MAX_PRIORITY
from holdfast.system.documents import decode_text


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add TASK, and the options that override its keys, with the names that `sky launch` uses."""
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK",
        help="YAML file in SkyPilot's format",
    )
    parser.add_argument(
        "args", nargs="*", metavar="COMMAND", help="after --, in place of a file: a command and its arguments"
    )
    parser.add_argument("--name", "-n", metavar="NAME", help="name of the job (default: from the file)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable of envs; K alone copies it from this environment; can be repeated",
    )
    parser.add_argument(
        "--env-file",
        metavar="FILE",
        help="set variables from a file with one K=V per line; --env overrides them",
    )
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable of secrets, as --env does; its value is never shown",
    )
    parser.add_argument(
        "--gpus",
        metavar="NAME:N",
        help="GPUs per node, such as A100:8, which replace all accelerators of the file; or none",
    )
    parser.add_argument("--num-nodes", type=count, metavar="N", help="number of nodes")
    parser.add_argument(
        "--priority",
        type=_priority,
        metavar="N",
        help="priority: if several jobs wait for GPUs, CPUs or memory here, the greatest starts first: "
        f"{-MAX_PRIORITY} to {MAX_PRIORITY} (default: 0)",
    )
    parser.add_argument(
        "--workdir",
        metavar="FOLDER",
        help="folder to copy as the workdir (default for a command: the current one)",
    )


def read_tasks(args: argparse.Namespace) -> TaskFile:
    """Return the task of a command line, or the tasks of a pipeline.

    Raises:
        NotFound: the file or the workdir does not exist.
        InvalidInput: an option or the file is invalid.
    """
    from holdfast.jobs.task.parser import Overrides, command_task, load_tasks

    overrides = Overrides(
        args.name,
        {**_file_variables(args.env_file), **_variables(args.env, "--env")},
        _variables(args.secret, "--secret"),
        _accelerators(args.gpus),
        args.num_nodes,
        _workdir(args.workdir),
        args.priority,
    )
    words = args.command_line
    if (args.task is None) == (not words) or args.args:
        raise InvalidInput(
            "Expected a task file, or -- and a command, as in `holdfast launch -- python train.py`. Nothing "
            "was started."
        )
    if not words:
        return load_tasks(args.task, overrides)
    _check_folder(args.workdir)
    # One word is text for the shell, such as 'a && b'. Several are a program and its arguments.
    task = command_task(words[0] if len(words) == 1 else shlex.join(words), overrides)
    return TaskFile(task.name, (task,), task.path)


def _check_folder(workdir: str | None) -> None:
    """Check that a command does not copy the user's whole home by mistake.

    Raises:
        InvalidInput: the current folder is the home or the root, and no workdir is given.
    """
    here = Path.cwd()
    if workdir is None and (here == Path.home() or here.parent == here):
        raise InvalidInput(
            f"A command runs in a copy of the current folder, which is {here}. Change to the folder of the "
            "training, or give --workdir FOLDER. Nothing was started."
        )


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
            raise InvalidInput(
                f"{option} {word:.100}: expected NAME=VALUE with the name of a variable, found {name!r:.100}."
            )
        if not equals:
            if name not in os.environ:
                raise InvalidInput(f"{option} {name}: expected {name}=VALUE, or a variable that is set here.")
            value = os.environ[name]
        found[name] = value
    return found


def _accelerators(text: str | None) -> str | None:
    from holdfast.jobs.task.amounts import parse_accelerators

    if text is not None and isinstance(read := parse_accelerators(text), str):
        raise InvalidInput(f"--gpus {text}: {read}. Nothing was started.")
    return text


def _priority(text: str) -> int:
    """Return the value of `--priority`."""
    number = int(text)
    if abs(number) > MAX_PRIORITY:
        raise ValueError
    return number


def _workdir(folder: str | None) -> str | None:
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise NotFound(
            f"--workdir: the folder {folder} does not exist. For a git repository, use `workdir: {{url: ..., "
            "ref: ...}` in a task file. Nothing was started."
        )
    return folder
