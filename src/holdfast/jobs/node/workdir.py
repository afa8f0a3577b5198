"""Workdir of a job: each node's own copy of a folder or repository, or an empty one."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import NotFound, redact
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.copies import Ignore, check_copy, copy_tree
from holdfast.jobs.node.mounts.mount_plan import left_out
from holdfast.jobs.node.repository import check_git, clone
from holdfast.jobs.node.skyignore import ignored_paths
from holdfast.jobs.task.model import Task


def check_workdir(task: Task) -> None:
    """Check that the workdir can be created.

    Raises:
        NotFound: the folder does not exist.
        Unsupported: it is a repository, and git is not installed.
    """
    where = f"{task.path}:{task.lines.get('workdir', 1)}: workdir"
    if task.repository is not None:
        check_git(where)
    if task.workdir is not None and not Path(task.workdir).is_dir():
        raise NotFound(f"{where}: the folder {task.workdir} does not exist. Nothing was started.")


def create_workdir(task: Task, folder: JobFolder) -> None:
    """Create a workdir for every node.

    Raises:
        HoldfastError: see `clone` and `check_copy`.
        OSError: copying failed.

    Blocks: while files are copied.
    """
    source = Path(task.workdir) if task.workdir is not None else None
    ignore = _left_out(source, folder) if source is not None else None
    if source is not None and ignore is not None:
        what = f"{task.path}:{task.lines.get('workdir', 1)}: workdir"
        way_out = "Leave files out with a line in .skyignore or .gitignore, or mount them with file_mounts."
        check_copy(source, ignore, task.envs, num_copies=task.num_nodes, what=what, way_out=way_out)
    for rank in range(task.num_nodes):
        to = folder.workdir(rank)
        to.parent.mkdir(parents=True, exist_ok=True)
        if task.repository is not None and rank == 0:
            commit = clone(task.repository, to)
            with folder.log(0).open("a") as log:
                log.write(f"holdfast: workdir is {redact(task.repository.url)} at commit {commit}\n")
        elif task.repository is not None:
            copy_tree(folder.workdir(0), to)
        elif source is not None:
            copy_tree(source, to, ignore)
        else:
            to.mkdir()


def copy_without_ignored(source: Path, to: Path, job: JobFolder) -> None:
    """Copy a folder without files that are ignored, and without the state of jobs.

    Blocks: while files are copied.
    """
    copy_tree(source, to, _left_out(source, job))


def _left_out(source: Path, job: JobFolder) -> Ignore:
    """Return a function that names what a copy of a workdir does not contain."""
    ignored, is_left_out = ignored_paths(source), left_out(job)

    def ignore(folder: str, names: list[str]) -> list[str]:
        here = Path(folder).relative_to(source)
        return [*is_left_out(folder, names), *(name for name in names if str(here / name) in ignored)]

    return ignore
