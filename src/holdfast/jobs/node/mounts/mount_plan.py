"""Mount plan of a task: copies local files at submission, and records links and remote mounts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.copies import check_copy, copy_file, copy_tree
from holdfast.jobs.node.mounts.mount_spec import Link, MountKind, MountSpec, write_links, write_mount_specs
from holdfast.jobs.node.mounts.private_links import private_mounts
from holdfast.jobs.node.mounts.validation import fetch_limit, local_place
from holdfast.jobs.task.model import FileMount, MountMode, Task

_REMOTE = {
    MountMode.COPY: MountKind.COPY,
    MountMode.MOUNT: MountKind.BUCKET,
    MountMode.MOUNT_CACHED: MountKind.CACHE,
}


def place(task: Task, folder: JobFolder, state: Path, further: Iterable[Link] = ()) -> None:
    """Copy local files, and record the links and mounts of a job.

    Args:
        further: links of the job that are not in `file_mounts`.

    Blocks: while files are copied.
    """
    links, specs, private = list(further), [], list(private_mounts(task))
    for number, mount in enumerate(task.file_mounts):
        if mount.is_in_place:
            continue
        source = local_place(mount, state) if not mount.is_remote else Path()
        if mount.is_remote or mount.mode is MountMode.MOUNT_CACHED:
            spec = _spec(mount, number, folder, state)
            specs.append(spec)
            source = Path(spec.path)
        elif mount.source is None:
            source.mkdir(parents=True, exist_ok=True)
        if not mount.is_remote and mount.mode is MountMode.COPY:
            way_out = "Mount a smaller folder, or use its path in the commands."
            what = f"{task.path}:{mount.line}: file_mounts.{mount.target}"
            check_copy(source, left_out(folder), task.envs, num_copies=1, what=what, way_out=way_out)
            source = _copied(source, _own_path(folder, number), folder)
        is_private = mount in private
        if mount.is_inside and mount.target.startswith(("/", "~")):
            links.append(Link(mount.target, str(source), mount.target, is_inside=True))
            continue
        links += [
            Link(target, str(source), mount.target, is_private)
            for target in _targets(mount, task.num_nodes, folder)
        ]
    write_links(folder, links)
    write_mount_specs(folder, specs)


def copy(source: Path, to: Path, job: JobFolder) -> None:
    """Copy a file or a folder for a job. Keeps symbolic links, and leaves out what `left_out` names."""
    if source.is_dir():
        copy_tree(source, to, left_out(job))
    else:
        copy_file(source, to)


def left_out(job: JobFolder) -> Callable[[str, list[str]], list[str]]:
    """Return a function for `shutil.copytree` that names what no copy for a job contains.

    That is sockets, pipes and devices, and the state of all jobs: the copy is in there, and would contain
    itself, and the secrets of other jobs.
    """
    own = {path.resolve() for path in (job.path, job.path.parent, job.path.parent.parent)}
    own_names = {path.name for path in own}

    def ignore(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name) for name in names}
        return [
            name
            for name, path in paths.items()
            if not (path.is_symlink() or path.is_dir() or path.is_file())
            or (name in own_names and path.resolve() in own)
        ]

    return ignore


def _spec(mount: FileMount, number: int, folder: JobFolder, state: Path) -> MountSpec:
    place = mount.source if mount.is_remote else str(local_place(mount, state))
    assert place is not None
    return MountSpec(
        _REMOTE[mount.mode],
        place,
        str(_own_path(folder, number)),
        mount.target,
        is_read_only=_is_read_only(mount.spec),
        fetch_bytes=fetch_limit(mount),
    )


def _is_read_only(spec: Any) -> bool:
    config = spec.get("config") or {}
    mount = config.get("mount") or {}
    return bool(mount.get("read_only")) or str(spec.get("type", "")).upper() == "DATASET_RO"


def _own_path(folder: JobFolder, number: int) -> Path:
    return folder.copies / str(number)


def _copied(source: Path, to: Path, job: JobFolder) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    copy(source, to, job)
    return to


def _targets(mount: FileMount, num_nodes: int, folder: JobFolder) -> Iterator[str]:
    target = Path(mount.target).expanduser()
    if target.is_absolute():
        yield os.path.normpath(target)
        return
    for rank in range(num_nodes):
        yield os.path.normpath(folder.workdir(rank) / target)
