"""The workdir of a job: each node's own copy of a folder, or of a repository, or an empty one."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast.errors import NotFound
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.ignored import ignored
from holdfast.jobs.node.mounts.placing import no_files
from holdfast.jobs.node.repository import check_git, clone
from holdfast.jobs.task.contents import Task


def check_workdir(task: Task) -> None:
    """Refuse a workdir that cannot be had.

    Raises:
        NotFound: the folder is not there.
        Unsupported: it is in a repository, and there is no git.
    """
    where = f"{task.path}:{task.lines.get('workdir', 1)}: workdir"
    if task.repository is not None:
        check_git(where)
    if task.workdir is not None and not Path(task.workdir).is_dir():
        raise NotFound(f"{where}: there is no folder {task.workdir}. Nothing was started.")


def put_workdir(task: Task, folder: JobFolder) -> None:
    """Give every node its own copy of the workdir; an empty one without.

    Raises:
        HoldfastError: see `clone`.
        OSError: it could not be copied.

    Blocks: while files are copied.
    """
    source = Path(task.workdir) if task.workdir is not None else None
    for rank in range(task.num_nodes):
        to = folder.workdir(rank)
        to.parent.mkdir(parents=True, exist_ok=True)
        if task.repository is not None and rank == 0:
            commit = clone(task.repository, to)
            _tell(folder, f"workdir is {task.repository.url} at commit {commit}")
        elif task.repository is not None:
            shutil.copytree(folder.workdir(0), to, symlinks=True)
        elif source is not None:
            copy_without_ignored(source, to)
        else:
            to.mkdir()


def copy_without_ignored(source: Path, to: Path) -> None:
    """Copy a folder without what `.skyignore`, or else git, says is to be ignored.

    Blocks: while files are copied.
    """
    left_out = ignored(source)

    def leave_out(folder: str, names: list[str]) -> list[str]:
        here = Path(folder).relative_to(source)
        return [*no_files(folder, names), *(name for name in names if str(here / name) in left_out)]

    shutil.copytree(source, to, symlinks=True, ignore=leave_out)


def _tell(folder: JobFolder, text: str) -> None:
    with folder.log(0).open("a") as log:
        log.write(f"holdfast: {text}\n")
