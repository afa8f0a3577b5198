"""The link ~/sky_workdir, for a job whose files or programs name it. One job at a time has it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import Conflict, Unsupported
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.mount_spec import Link
from holdfast.jobs.node.mounts.symlinks import link_user
from holdfast.jobs.node.scripts import node_variables
from holdfast.jobs.records import Records
from holdfast.jobs.task.model import Task
from holdfast.jobs.task.sky_workdir import SKY_WORKDIR, replace_sky_workdir

_MAX_BYTES = 1 << 20
_YAML = frozenset({".yaml", ".yml"})
_SUFFIXES = _YAML | {"", ".py", ".sh", ".bash", ".ipynb", ".json", ".toml", ".cfg", ".ini"}
"""Suffixes of programs and settings, which may name the folder."""
_TASK_FILE = re.compile(rb"^(?:run|setup):", re.M)


def workdir_links(task: Task, folder: JobFolder, records: Records) -> list[Link]:
    """Return the link that a job needs in its user's home, if any. The workdir must be complete.

    Commands that name ~/sky_workdir need none, because the path is replaced in them.

    Raises:
        Unsupported: the job has several nodes, which have a workdir each.
        Conflict: another job has the link, or another file is in its place.
    """
    used_in = next(_uses(task, folder), None)
    if used_in is None:
        return []
    target = Path.home() / SKY_WORKDIR
    what = f"{used_in} names {SKY_WORKDIR}"
    way_out = "Use paths relative to the workdir, in which commands start. Nothing was started."
    if task.num_nodes > 1:
        raise Unsupported(
            f"{task.path}: {what}. Each of the {task.num_nodes} nodes has a workdir of its own, and {target} "
            f"can lead to one only. {way_out}"
        )
    user = link_user(records, folder, str(target))
    if user is not None:
        raise Conflict(
            f"{task.path}: {what}. {target} leads to the workdir of job {user} until that job has ended. "
            f"Wait for it or cancel it. To run both at once: {way_out[0].lower()}{way_out[1:]}"
        )
    is_left = target.is_symlink() and target.readlink().is_relative_to(folder.path.parent)
    if os.path.lexists(target) and not is_left:
        raise Conflict(
            f"{task.path}: {what}. {target} already exists and does not belong to a job, so it was not "
            f"changed. Move it away, or: {way_out[0].lower()}{way_out[1:]}"
        )
    return [Link(str(target), str(folder.workdir(0)), f"~/{SKY_WORKDIR}")]


def _uses(task: Task, folder: JobFolder) -> Iterator[str]:
    """Yield the places that name the folder, except for those where its path is replaced."""
    workdir = str(folder.workdir(0))
    for name, text in (("setup", task.setup), ("run", task.run)):
        if SKY_WORKDIR in replace_sky_workdir(text, workdir).replace(workdir, ""):
            yield name
    for name, value in node_variables({**task.envs, **task.secrets}, folder, 0).items():
        if SKY_WORKDIR in value.replace(workdir, ""):
            yield f"envs.{name}"
    yield from _files(Path(workdir))


def _files(workdir: Path) -> Iterator[str]:
    """Yield the programs and settings in a workdir that name the folder."""
    for parent, folders, names in os.walk(workdir):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix not in _SUFFIXES or not path.is_file() or path.stat().st_size > _MAX_BYTES:
                continue
            data = path.read_bytes()
            is_task_file = path.suffix in _YAML and _TASK_FILE.search(data) is not None
            if SKY_WORKDIR.encode() in data and not is_task_file:
                yield str(path.relative_to(workdir))
