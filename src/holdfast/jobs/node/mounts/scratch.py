"""Scratch folder: the files of a job's mounts on one machine, where the job's own folder is on a shared disk.

It has the same files as the folder of a job on a single machine, as far as mounts need them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import Template

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Conflict, InvalidInput, RetryLater
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import encode, read_document, write_document
from holdfast.jobs.node.mounts import mount_records
from holdfast.jobs.node.mounts.mount_records import Link
from holdfast.jobs.node.mounts.uploads import remove_copies
from holdfast.system.privacy import is_private

SCRATCH = "HOLDFAST_SCRATCH"
"""Variable that names the folder for scratch folders. It may contain other variables of the node."""
_USUAL = ("SLURM_TMPDIR", "TMPDIR")
_DEFAULT = "/tmp"
_OWNER = "owner.json"


class ScratchOwner(Struct, frozen=True):
    """Owner of a scratch folder. Never changes."""

    task_id: str
    job: str  # path of the job's folder
    machine: str


def scratch_parent(environment: Mapping[str, str]) -> Path:
    """Return the folder for scratch folders on this machine, which exists."""
    given = environment.get(SCRATCH)
    if not given:
        found = (environment.get(name) for name in _USUAL)
        return Path(next((path for path in found if path and Path(path).is_dir()), _DEFAULT))
    path = Path(Template(given).safe_substitute(environment))
    if not path.is_absolute() or "$" in str(path):
        raise InvalidInput(f"{SCRATCH}: expected an absolute path, found {given!r}, which means {path} here.")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RetryLater(f"Cannot create {path}, which {SCRATCH} names: {error.strerror}.") from error
    return path


def scratch_folder(parent: Path, job: JobFolder, task_id: str) -> JobFolder:
    """Return the scratch folder of a job below a parent. It need not exist."""
    digest = hashlib.blake2b(f"{job.path}\n{task_id}".encode(), digest_size=6).hexdigest()
    return JobFolder(parent / f"holdfast-{os.geteuid()}-{job.path.name}-{digest}")


def open_scratch(scratch: JobFolder, owner: ScratchOwner) -> None:
    """Create a job's scratch folder, or check that an existing one is its own."""
    path = scratch.path
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise RetryLater(f"Cannot use {path.parent} for the mounts of the job: {error.strerror}.") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise Conflict(
            f"{path.parent} can be changed by other users, who could replace the folder of the job. It was "
            f"not used. Set {SCRATCH} to a folder of yours on a disk of the node."
        )
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not is_private(path):  # made by another user, or a link
            raise Conflict(
                f"{path} already exists, and is not a private folder of yours. It was not used. Set "
                f"{SCRATCH} to a folder of yours on a disk of the node, and launch the job again."
            )
        found = read_scratch_owner(scratch) or _claim(scratch, owner)
    except OSError as error:
        if isinstance(error, Conflict):
            raise
        raise RetryLater(
            f"Cannot create {path} for the mounts of the job: {error.strerror}. Free some space there, or "
            f"set {SCRATCH} to another folder on a disk of the node."
        ) from error
    if found.machine != owner.machine:
        raise Conflict(
            f"{path} belongs to {found.machine}, and this is {owner.machine}: each node needs a folder of "
            f"its own. Set {SCRATCH} to one that no other node has, such as '/scratch/$SLURMD_NODENAME'."
        )
    if found != owner:
        raise Conflict(f"{path} belongs to the job in {found.job}, and was not used.")


def read_scratch_owner(scratch: JobFolder) -> ScratchOwner | None:
    """Return the owner of a scratch folder, or None for another folder."""
    return read_document(scratch.path / _OWNER, ScratchOwner)


def remove_scratch(scratch: JobFolder) -> bool:
    """Remove a scratch folder, unless it has files that are not uploaded. Return True if it was removed."""
    mount_records.unmount_below(scratch.path)
    remove_copies(scratch)
    if any(Path(spec.path).exists() for spec in mount_records.caches(scratch)):
        return False
    shutil.rmtree(scratch.path)
    return True


def _claim(scratch: JobFolder, owner: ScratchOwner) -> ScratchOwner:
    """Record the owner of a new folder, unless another machine has just done so. Return the owner."""
    own = scratch.path / f".{_OWNER}.{owner.machine}.{os.getpid()}"
    try:
        own.write_text(encode(owner))
        with suppress(FileExistsError):
            (scratch.path / _OWNER).hardlink_to(own)  # whole or not at all, and only for the first one
    finally:
        own.unlink(missing_ok=True)
    found = read_scratch_owner(scratch)
    assert found is not None
    return found


def write_scratch_mounts(job: JobFolder, scratch: JobFolder, *, is_shared: bool) -> None:
    """Write a job's mounts and links into its scratch folder, for mounter and shells."""
    paths = _paths(job, scratch)
    specs = mount_records.read_mount_specs(job)
    moved = [replace(one, path=paths[one.path], is_shared=is_shared) for one in specs]
    write_document(scratch.mounts, moved)
    links = [replace(one, source=paths.get(one.source, one.source)) for one in mount_records.read_links(job)]
    write_document(scratch.links, links)


def _paths(job: JobFolder, scratch: JobFolder) -> dict[str, str]:
    """Return the paths of a job's mounts in its scratch folder, by those in the job's folder."""
    return {
        spec.path: str(scratch.copies / Path(spec.path).name) for spec in mount_records.read_mount_specs(job)
    }


def moved_links(job: JobFolder, scratch: JobFolder) -> list[Link]:
    """Return the links of a job to files in its scratch folder."""
    paths, links = _paths(job, scratch), mount_records.read_links(job)
    return [replace(one, source=paths[one.source]) for one in links if one.source in paths]


def fixed_links(job: JobFolder) -> list[Link]:
    """Return the visible links of a job to files outside of scratch folders."""
    sources = {spec.path for spec in mount_records.read_mount_specs(job)}
    return [link for link in mount_records.visible_links(job) if link.source not in sources]


def shared_links(job: JobFolder) -> list[Link]:
    """Return the visible links of a job to scratch folders that all nodes see: those outside of workdirs."""
    fixed, nodes = fixed_links(job), job.path / "nodes"
    moved = [link for link in mount_records.visible_links(job) if link not in fixed]
    return [link for link in moved if not Path(link.target).is_relative_to(nodes)]


def remove_shared_links(job: JobFolder, task_id: str) -> None:
    """Remove the links of `shared_links`, if they lead to a scratch folder of this job."""
    own = scratch_folder(Path("/"), job, task_id).path.name
    for link in shared_links(job):
        target = Path(link.target)
        with suppress(OSError):
            if own in target.readlink().parts:
                target.unlink()
