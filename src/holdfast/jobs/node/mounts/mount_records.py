"""Mounts and links of a job: their records, links for all programs or the job only, FUSE file systems.

Private links are at paths such as /checkpoints. Every job can have its own, and none needs permission to
write to /. They are in a mount namespace, which each shell of the job enters before its commands begin.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.errors import Conflict, InvalidInput, TimedOut
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.journal import read_document
from holdfast.jobs.records import Records
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import FileMount, MountMode, Task
from holdfast.system.entry import command
from holdfast.system.linux.mount_namespace import add_links, enter
from holdfast.system.linux.mounts import mount_points
from holdfast.system.linux.program_runs import run_program

_TRIAL_S = 60.0
ROOT = Path("/")


class MountSpec(Struct, frozen=True):
    """Specification of a mount, shared by all nodes of a job."""

    mode: MountMode  # all objects, copied once; a file system served by rclone; a write-back directory
    place: str  # path or URL
    path: str  # absolute, in the job's folder
    key: str  # key in the task file, for messages
    is_read_only: bool = False
    fetch_bytes: int | None = None  # limit for the download into a write-back directory
    is_shared: bool = False  # other machines mount the same place in the same attempt


def read_mount_specs(folder: JobFolder) -> list[MountSpec]:
    """Return the specifications of a job's mounts."""
    return read_document(folder.mounts, list[MountSpec]) or []


def caches(folder: JobFolder) -> list[MountSpec]:
    """Return the write-back directories among a job's mounts."""
    return [spec for spec in read_mount_specs(folder) if spec.mode is MountMode.MOUNT_CACHED]


class Link(Struct, frozen=True):
    """Symbolic link at a path of the job."""

    target: str  # absolute, unless `is_inside`
    source: str  # absolute
    key: str  # key in the task file, for messages
    is_private: bool = False  # seen by the job's processes only
    is_inside: bool = False  # in the job's containers; a target may begin with ~ until they exist


def read_links(folder: JobFolder) -> list[Link]:
    """Return the links of a job, private ones included."""
    return read_document(folder.links, list[Link]) or []


def visible_links(folder: JobFolder) -> list[Link]:
    """Return the links of a job that all programs see."""
    return [link for link in read_links(folder) if not (link.is_private or link.is_inside)]


def outside_path(path: str, links: Sequence[Link]) -> str:
    """Return a path of a job as it is outside of the job: that below a link's source, not its target."""
    for link in links:
        if Path(path).is_relative_to(link.target):
            return str(Path(link.source, Path(path).relative_to(link.target)))
    return path


def create_links(links: Iterable[Link], folder: JobFolder, records: Records | None) -> None:
    """Create links of a job that do not exist yet. Those that ended jobs have left are replaced.

    Without `records`, no other job can need a link at the same path.
    """
    state = folder.path.parents[1]
    for link in links:
        target = Path(link.target)
        if target.is_symlink():
            found = target.readlink()
            if str(found) == link.source:
                continue
            is_scratch = any(part.startswith(f"holdfast-{os.geteuid()}-") for part in found.parts)
            is_of_job = found.is_relative_to(state) or is_scratch
            if is_of_job and not (records and link_user(records, folder, link.target)):
                target.unlink()
        if target.exists() or target.is_symlink():
            raise Conflict(
                f"file_mounts.{link.key}: {target} already exists and does not belong to this job, so it "
                "was not changed. Choose another path for the mount, or move the existing file away."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link.source)
        except OSError as error:
            raise InvalidInput(
                f"file_mounts.{link.key}: cannot create {target} on this machine: {error}. Choose a path "
                "that you can write to: below ~, or relative to the workdir."
            ) from error


def remove_links(folder: JobFolder) -> None:
    """Remove links to files in the job's own folder. Other links stay."""
    for link in visible_links(folder):
        target = Path(link.target)
        with contextlib.suppress(OSError):  # also if it is not a link
            if Path(link.source).is_relative_to(folder.path) and str(target.readlink()) == link.source:
                target.unlink()


def link_user(records: Records, folder: JobFolder, target: str) -> int | None:
    """Return the number of another running job with a link at a path, or None."""
    for record in records.all():
        status = record.state.job_state.status
        is_behind = record.job.spec.after is not None and status is JobStatus.PENDING  # in a pipeline
        other = job_folder(folder.path.parents[1], record.job.number)
        if status.is_final or is_behind or other.path == folder.path:
            continue
        if any(link.target == target for link in visible_links(other)):
            return record.job.number
    return None


def private_mounts(task: Task) -> Iterator[FileMount]:
    """Yield the mounts of a task whose links are private."""
    for mount in task.file_mounts:
        target = normal_target(mount)
        is_linked = target.is_absolute() and not mount.is_in_place and not mount.is_inside
        if is_linked and is_private_target(target):
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
    parent = _existing_parent(target)
    if not os.access(parent, os.W_OK | os.X_OK):
        return True
    return parent == ROOT and why_unavailable() is None


@functools.cache
def why_unavailable() -> str | None:
    """Return why this user cannot have private links here, or None if they can, as a process tries it."""
    try:
        trial = run_program(command("holdfast.system.linux.mount_namespace"), timeout_s=_TRIAL_S)
    except TimedOut as error:
        return str(error)
    return None if trial.status == 0 else (trial.error.splitlines() or [trial.message])[-1]


def is_coverable(target: Path, state: Path) -> bool:
    """Return True if a private link may cover what is at a path: an empty folder, or a job's link."""
    if target.is_symlink():
        return target.readlink().is_relative_to(state)
    try:
        return not list(target.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def enter_private_links(folder: JobFolder) -> None:
    """Move this process, of one thread, to where its job's private links are, if it has some."""
    groups: dict[Path, dict[str, str]] = defaultdict(dict)
    for link in read_links(folder):
        if link.is_private:
            parent = _existing_parent(Path(link.target))
            groups[parent][str(Path(link.target).relative_to(parent))] = link.source
    if not groups:
        return
    folder.staging.mkdir(exist_ok=True)
    enter()
    # The deepest first: a directory that was covered is among the entries of those above it.
    for parent in sorted(groups, key=lambda path: len(path.parts), reverse=True):
        add_links(parent, groups[parent], folder.staging)


def _existing_parent(target: Path) -> Path:
    """Return the nearest directory above a path that exists."""
    return next((parent for parent in target.parents if parent.is_dir()), ROOT)


_UNMOUNT_LIMIT_S = 30.0
_DEVICE = Path("/dev/fuse")


def why_not_mountable(source: str) -> str:
    """Return why this machine cannot mount a bucket, and what to use instead. Empty if it can."""
    lacking = []
    if shutil.which("rclone") is None:
        lacking.append("the program rclone (`apt-get install rclone`, or from rclone.org)")
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        lacking.append("the program fusermount3 (`apt-get install fuse3`)")
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        lacking.append(f"{_DEVICE} (in a container: `--device /dev/fuse --cap-add SYS_ADMIN`)")
    if not lacking:
        return ""
    return (
        f"mounting {source} as a file system requires {' and '.join(lacking)}. Alternatively, "
        "`mode: MOUNT_CACHED` writes to the bucket through a local directory, and `mode: COPY` copies it to "
        "this machine."
    )


def mounted_below(folder: Path) -> list[Path]:
    """Return the mount points at or below a folder, deepest first, from the kernel's list."""
    # A file system whose server is dead does not respond.
    found = [mount.path for mount in mount_points() if mount.path.is_relative_to(folder)]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def is_mounted(path: Path) -> bool:
    """Return True if a file system is mounted at a path."""
    return path in mounted_below(path)


def unmount_below(folder: Path) -> None:
    """Unmount all file systems at or below a folder. Open files keep working until they are closed."""
    for path in mounted_below(folder):
        _unmount(path)


def _unmount(path: Path) -> None:
    errors = []
    for words in (["fusermount3", "-uz"], ["fusermount", "-uz"], ["umount", "-l"]):
        if shutil.which(words[0]) is None:
            continue
        try:
            error = run_program([*words, str(path)], timeout_s=_UNMOUNT_LIMIT_S).error
        except TimedOut as late:
            error = str(late)
        if path not in mounted_below(path):
            return
        errors.append(error)
    raise Conflict(f"Cannot unmount {path}: {'; '.join(errors)}.")
