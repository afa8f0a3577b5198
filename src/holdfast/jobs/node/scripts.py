"""Scripts and variables of a job, for each of its nodes."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.jobs.conda import activates_conda, conda_start
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.virtual_environment import is_wanted
from holdfast.jobs.task.model import Task
from holdfast.jobs.task.sky_workdir import is_plain, replace_sky_workdir
from holdfast.system.linux.files import write_atomic


def write_scripts(task: Task, folder: JobFolder, *, prefix: str = "") -> None:
    """Write the scripts of all nodes, with each node's workdir in the place of ~/sky_workdir.

    Args:
        prefix: commands for the beginning of the first line. Line numbers in messages stay those of the task.

    Raises:
        InvalidInput: a script names ~/sky_workdir, and the path of the job needs quotes in a shell.
    """
    write_atomic(folder.shell_start, conda_start(task.setup, task.run))
    start = f"{prefix}. {shlex.quote(str(folder.shell_start))}; "
    for rank in range(task.num_nodes):
        folder.workdir(rank).parent.mkdir(parents=True, exist_ok=True)
        for name, text in _texts(task, folder, rank):
            write_atomic(folder.script(name, rank), start + text.rstrip("\n") + "\n")


def choose_venv(variables: Mapping[str, str], folder: JobFolder, rank: int, machine: str = "") -> Path | None:
    """Return the folder of a node's own virtual environment, or None without one.

    A job that activates an environment of conda installs into that one, and a job in an image into its
    containers.

    Args:
        variables: those of the shell that launched the job, and of its task.
        machine: see `JobFolder.venv`.
    """
    if not is_wanted(variables) or folder.image.exists():
        return None
    for name in ("setup", "run"):
        with contextlib.suppress(FileNotFoundError):
            if activates_conda(folder.script(name, rank).read_text(errors="replace")):
                return None
    return folder.venv(rank, machine)


def node_variables(variables: Mapping[str, str], folder: JobFolder, rank: int) -> dict[str, str]:
    """Return variables of a task, with a node's workdir in the place of ~/sky_workdir."""
    workdir = str(folder.workdir(rank))
    # As after the `=` of an assignment, where a shell replaces ~ after each colon too.
    return {
        name: replace_sky_workdir(f"={value}", workdir).removeprefix("=") for name, value in variables.items()
    }


def _texts(task: Task, folder: JobFolder, rank: int) -> Iterator[tuple[str, str]]:
    workdir = str(folder.workdir(rank))
    for name, text in (("setup", task.setup), ("run", task.run)):
        replaced = replace_sky_workdir(text, workdir)
        if replaced != text and not is_plain(workdir):
            raise InvalidInput(
                f"{task.path}:{task.lines.get(name, 1)}: {name}: ~/sky_workdir means {workdir} in this job, "
                "which a shell does not read without quotes. Set HOLDFAST_STATE to a folder whose path has "
                "only letters, digits and any of / . _ - + @ % =. Nothing was started."
            )
        if text:
            yield name, replaced
