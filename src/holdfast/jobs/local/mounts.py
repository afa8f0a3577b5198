"""The `file_mounts` of local jobs: what is to be visible where, put in place as links, taken away again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.errors import Conflict, InvalidInput, NotFound, Unsupported
from holdfast.jobs.local.folder import JobFolder, bucket_dir
from holdfast.jobs.local.plan import write_whole
from holdfast.jobs.task.contents import FileMount, MountMode, Task

# The seam for other kinds of mounts: `place` turns each FileMount into a Link to a folder of this machine,
# once, when the job is submitted; `attach` is called before each attempt, `detach` when the job has ended.


@dataclass(frozen=True, slots=True)
class Link:
    """A path of the job that leads to a place of this machine."""

    target: str  # absolute
    source: str  # absolute; there, and a folder or a file
    key: str  # as it stands in the task file, for messages


def check(task: Task, state: Path) -> None:
    """Refuse mounts that cannot be made here, before anything is copied.

    Raises:
        Unsupported: this version cannot.
        NotFound: a source is not there.
        Conflict: something is at a target.
        InvalidInput: nothing is named, or not as it must be.
    """
    for mount in task.file_mounts:
        where = f"{task.path}:{mount.line}: file_mounts.{mount.target}"
        if mount.is_remote:
            raise Unsupported(
                f"{where}: {mount.source} is in an object store, and local jobs of this version mount "
                "folders of this machine only. Give a local path, or use the URL as the home of the training."
            )
        if mount.mode is MountMode.MOUNT_CACHED:
            raise Unsupported(
                f"{where}: mode MOUNT_CACHED is not in this version for local jobs. With `mode: MOUNT` the "
                "folder is on this machine's own disk, where nothing has to be cached; or let a Checkpointer "
                "have a bucket as its home, with local=."
            )
        if mount.source is None and not mount.bucket:
            raise InvalidInput(f"{where}: expected a source or the name of a bucket, found neither.")
        if mount.source is not None and not _path(mount.source).exists():
            raise NotFound(f"{where}: there is no {_path(mount.source)} here. Nothing was started.")
        target = Path(mount.target).expanduser()
        if target.is_absolute() and target.exists() and not target.is_symlink():
            raise Conflict(f"{where}: {target} is there already, and was left alone. Choose another path.")
        if mount.source is None and "/" in (mount.bucket or ""):
            raise InvalidInput(f"{where}: expected the name of a bucket, found {mount.bucket!r}.")


def place(task: Task, folder: JobFolder, state: Path) -> list[Link]:
    """Copy what is to be copied, and write down what has to lead where.

    Blocks: while files are copied.
    """
    links = []
    for number, mount in enumerate(task.file_mounts):
        source = _source(mount, number, folder, state)
        links += [
            Link(target, str(source), mount.target) for target in _targets(mount, task.num_nodes, folder)
        ]
    write_whole(_document(folder), json.dumps([asdict(link) for link in links]))
    return links


def attach(folder: JobFolder, *, is_in_use: Callable[[str], bool], state: Path) -> None:
    """Put all links in place; those that are there already are left alone.

    Args:
        folder: of the job.
        is_in_use: whether another living job needs the link at a path.
        state: links to places in here are ours to replace.

    Raises:
        Conflict: something else is at a target.
        InvalidInput: nothing can be made there.
    """
    for link in read(folder):
        target = Path(link.target)
        if target.is_symlink() and str(target.readlink()) == link.source:
            continue
        if target.is_symlink() and target.readlink().is_relative_to(state) and not is_in_use(link.target):
            target.unlink()
        if target.exists() or target.is_symlink():
            raise Conflict(
                f"file_mounts.{link.key}: {target} is there already and does not belong to this job, so it "
                "was left alone. Choose another path for the mount, or move away what is there."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link.source)
        except OSError as error:
            raise InvalidInput(
                f"file_mounts.{link.key}: {target} could not be made on this machine: {error}. Choose a path "
                "that you may write to: below ~, or relative to the workdir."
            ) from error


def detach(folder: JobFolder) -> None:
    """Take away links to what the job alone had; others lead to what stays, and stay too."""
    for link in read(folder):
        target = Path(link.target)
        if Path(link.source).is_relative_to(folder.path) and target.is_symlink():
            with contextlib.suppress(OSError):
                if str(target.readlink()) == link.source:
                    target.unlink()


def read(folder: JobFolder) -> list[Link]:
    """The links of a job."""
    try:
        return [Link(**told) for told in json.loads(_document(folder).read_text())]
    except FileNotFoundError:
        return []


def copy_workdir(workdir: str | None, folder: JobFolder, num_nodes: int) -> None:
    """Give every node its own copy of the workdir; an empty one without.

    Blocks: while files are copied.
    """
    for rank in range(num_nodes):
        to = folder.workdir(rank)
        to.parent.mkdir(parents=True, exist_ok=True)
        if workdir is None:
            to.mkdir()
        else:
            _copy(Path(workdir), to)


def check_workdir(task: Task) -> None:
    """Refuse a workdir that is no folder.

    Raises:
        NotFound: it is not there.
    """
    if task.workdir is not None and not Path(task.workdir).is_dir():
        line = task.lines.get("workdir", 1)
        raise NotFound(
            f"{task.path}:{line}: workdir: there is no folder {task.workdir}. Nothing was started."
        )


def _source(mount: FileMount, number: int, folder: JobFolder, state: Path) -> Path:
    if mount.source is None:
        source = bucket_dir(state, mount.bucket or "")
        source.mkdir(parents=True, exist_ok=True)
    else:
        source = _path(mount.source)
    if mount.mode is not MountMode.COPY:
        return source
    copy = folder.copies / str(number)
    copy.parent.mkdir(parents=True, exist_ok=True)
    _copy(source, copy)
    return copy


def _copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, symlinks=True, ignore=_no_files)
    else:
        shutil.copy2(source, to)


def _no_files(folder: str, names: list[str]) -> list[str]:
    """Sockets, pipes and devices, which cannot be copied."""
    paths = {name: Path(folder, name) for name in names}
    return [
        name for name, path in paths.items() if not (path.is_symlink() or path.is_dir() or path.is_file())
    ]


def _targets(mount: FileMount, num_nodes: int, folder: JobFolder) -> Iterator[str]:
    target = Path(mount.target).expanduser()
    if target.is_absolute():
        yield os.path.normpath(target)
        return
    for rank in range(num_nodes):
        yield os.path.normpath(folder.workdir(rank) / target)


def _path(source: str) -> Path:
    return Path(source.removeprefix("file://")).expanduser().absolute()


def _document(folder: JobFolder) -> Path:
    return folder.path / "mounts.json"
