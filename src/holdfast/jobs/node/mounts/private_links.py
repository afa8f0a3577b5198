"""Private links of a job: at paths such as /checkpoints, seen by the job's processes only.

Every job can have its own, and none needs permission to write to /. They are in a mount namespace, which each
shell of the job enters before its commands begin.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.mount_spec import read_links
from holdfast.jobs.task.model import FileMount, Task
from holdfast.system.entry import command
from holdfast.system.linux.mount_namespace import add_links, enter
from holdfast.system.linux.program_runs import run_program

_TRIAL_S = 60.0
ROOT = Path("/")


def private_mounts(task: Task) -> Iterator[FileMount]:
    """Yield the mounts of a task whose links are private."""
    for mount in task.file_mounts:
        target = normal_target(mount)
        if (
            target.is_absolute()
            and not mount.is_in_place
            and not mount.is_inside
            and is_private_target(target)
        ):
            yield mount


def normal_target(mount: FileMount) -> Path:
    """Return the target of a mount without `~`, `..` and a slash at the end. It may be relative."""
    return Path(os.path.normpath(Path(mount.target).expanduser()))


def private_note() -> str:
    """Return a note for the launch of a job with private links."""
    return "private to the job" if os.geteuid() == 0 else "private to the job, in which sudo fails"


def is_private_target(target: Path) -> bool:
    """Return True if a link at an absolute path is to be private.

    It has to be where this user cannot create one, and it is below /, where jobs would meet at short paths.
    Elsewhere, links that all programs can see are preferred.
    """
    parent = existing_parent(target)
    if not os.access(parent, os.W_OK | os.X_OK):
        return True
    return parent == ROOT and why_unavailable() is None


@functools.cache
def why_unavailable() -> str | None:
    """Return why this user cannot have private links here, or None if they can.

    Blocks: while a process tries it, at most a minute.
    """
    try:
        trial = run_program(command("holdfast.system.linux.mount_namespace"), timeout_s=_TRIAL_S)
    except subprocess.TimeoutExpired as error:
        return str(error)
    return None if trial.status == 0 else (trial.error.splitlines() or [trial.message])[-1]


def is_coverable(target: Path, state: Path) -> bool:
    """Return True if a private link may cover what is at a path.

    That is nothing, an empty folder, or a link of a job.

    Args:
        state: folder of all jobs.
    """
    if target.is_symlink():
        return target.readlink().is_relative_to(state)
    try:
        return not list(target.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def enter_private_links(folder: JobFolder) -> None:
    """Move this process, of one thread, to where its job's private links are.

    Does nothing if the job has none.
    """
    groups: dict[Path, dict[str, str]] = defaultdict(dict)
    for link in read_links(folder):
        if link.is_private:
            parent = existing_parent(Path(link.target))
            groups[parent][str(Path(link.target).relative_to(parent))] = link.source
    if not groups:
        return
    folder.staging.mkdir(exist_ok=True)
    enter()
    # The deepest first: a directory that was covered is among the entries of those above it.
    for parent in sorted(groups, key=lambda one: len(one.parts), reverse=True):
        add_links(parent, groups[parent], folder.staging)


def existing_parent(target: Path) -> Path:
    """Return the nearest directory above a path that exists."""
    return next((parent for parent in target.parents if parent.is_dir()), ROOT)
