"""Validation of mounts at submission, before anything is copied or started."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.address import hide_secrets
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import Conflict, Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.jobs.folder import bucket_folder
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.download import exists
from holdfast.jobs.node.mounts.private_links import (
    is_coverable,
    is_private_target,
    normal_target,
    private_mounts,
    why_unavailable,
)
from holdfast.jobs.task.amounts import memory_mib
from holdfast.jobs.task.model import FileMount, MountMode, Task
from holdfast.system.units import format_bytes

_OF_KERNEL = frozenset({"dev", "proc", "sys"})
_OF_PROGRAMS = frozenset({"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr"})
_OF_SYSTEM = frozenset({"home", "opt", "root", "run", "srv", "tmp", "var"})
"""Folders that an image has too, and that are hidden only if they are mounted as a whole."""
KEY = "config.mount_cached.vfs_cache_max_size"
"""Key of a mount for its limit. SkyPilot limits the cache of rclone with it."""
_DEFAULT = "10G"  # as on SkyPilot
_MAX_LISTED = 10_000  # number of objects whose sizes are added up at the launch. The mount itself adds up all


def validate(task: Task, state: Path, *, runs_here: bool = True) -> None:
    """Check that all mounts of a task can be created.

    Args:
        runs_here: True if the job runs on this machine, whose programs are checked.

    Blocks: never on a network, so that a dry run of an untrusted file sends nothing.
    """
    for mount in task.file_mounts:
        where = f"{task.path}:{mount.line}: file_mounts.{mount.target}"
        if mount.source is None and not mount.bucket:
            raise InvalidInput(f"{where}: expected a source or the name of a bucket, found neither.")
        if mount.source is None and "/" in (mount.bucket or ""):
            raise InvalidInput(f"{where}: expected the name of a bucket, found {mount.bucket!r}.")
        if mount.is_remote:
            _check_remote(mount, where, runs_here=runs_here)
        elif mount.source is not None and mount.mode is not MountMode.MOUNT_CACHED:
            _check_there(local_path(mount.source), where)
        if mount.mode is MountMode.MOUNT_CACHED:
            with _located(where):
                fetch_limit(mount)
            if not mount.is_remote:
                _check_folder(local_place(mount, state), where)
        target = normal_target(mount)
        if mount.is_inside:
            _check_inside(mount, where, state)
        elif target.is_absolute() and not mount.is_in_place:
            _check_target(target, where, state)
    _check_nesting(task)


def _check_nesting(task: Task) -> None:
    """Check that no private target is at or below another one."""
    private = [(mount, normal_target(mount)) for mount in private_mounts(task)]
    for mount, target in private:
        for other, above in private:
            if other is not mount and target.is_relative_to(above):
                raise InvalidInput(
                    f"{task.path}:{mount.line}: file_mounts.{mount.target}: it is at or below the target "
                    f"{other.target}. Choose another path. Nothing was started."
                )


def _check_target(target: Path, where: str, state: Path) -> None:
    """Check that a link can be created, or is possible as a private one."""
    if target.parts[1:2] and target.parts[1] in _OF_KERNEL:
        raise InvalidInput(f"{where}: /{target.parts[1]} is of the kernel. Choose another path.")
    if not is_private_target(target):
        is_free = not target.exists() or target.is_symlink()
    elif why := why_unavailable():
        raise Unsupported(
            f"{where}: you have no permission to create {target}, and a mount namespace, in which the job "
            f"could have it, is not possible on this machine: {why}. Choose a path below ~ or relative to "
            "the workdir, or ask the administrator to allow user namespaces. Nothing was started."
        )
    else:
        is_free = is_coverable(target, state)
    if not is_free:
        raise Conflict(f"{where}: {target} already exists, and was not changed. Choose another path.")


def _check_inside(mount: FileMount, where: str, state: Path) -> None:
    """Check a mount in a container: its target, and that its source does not hide files of the image."""
    parts = Path(os.path.normpath(mount.target)).parts
    if mount.target.startswith("/") and (len(parts) < 2 or parts[1] in _OF_KERNEL):
        raise InvalidInput(f"{where}: /{''.join(parts[1:2])} is of the kernel. Choose another path.")
    if mount.is_remote or mount.mode is not MountMode.MOUNT:
        return
    source = local_place(mount, state).resolve()
    top = source.parts[1] if len(source.parts) > 1 else ""
    if (len(source.parts) <= 2 and top in _OF_SYSTEM | {""}) or top in _OF_KERNEL | _OF_PROGRAMS:
        raise Unsupported(
            f"{where}: {source} is mounted at its own path in the container too, and would hide what "
            "the image has. Copy it with `mode: COPY`, or move it below another folder. Nothing was started."
        )


def validate_sources(task: Task, state: Path) -> None:
    """Check that sources of copies exist, and those of caches are not too large.

    Blocks: while stores respond, or for some seconds if they do not.
    """
    for mount in task.file_mounts:
        if mount.mode is MountMode.MOUNT_CACHED:
            with _located(f"{task.path}:{mount.line}: file_mounts.{mount.target}"):
                place = mount.source if mount.is_remote else None
                check_fetch(place or str(local_place(mount, state)), fetch_limit(mount))
        if mount.is_remote and mount.source is not None and mount.mode is MountMode.COPY:
            where = f"{task.path}:{mount.line}: file_mounts.{mount.target}"
            with _located(where):
                if not _may_be_there(mount.source):
                    raise NotFound(f"nothing exists at {hide_secrets(mount.source)}. Nothing was started.")


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:
        raise type(error)(f"{where}: {error}") from error


def local_path(source: str) -> Path:
    """Return the path on this machine that a source names."""
    return Path(source.removeprefix("file://")).expanduser().absolute()


def local_place(mount: FileMount, state: Path) -> Path:
    """Return the folder on this machine that is mounted, or replaces a bucket."""
    return bucket_folder(state, mount.bucket or "") if mount.source is None else local_path(mount.source)


def _check_there(path: Path, where: str) -> None:
    if not path.exists():
        raise NotFound(f"{where}: {path} does not exist. Nothing was started.")


def _check_folder(path: Path, where: str) -> None:
    """Check that the place of a write-back directory is not a file."""
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{where}: {path} is a file; mode MOUNT_CACHED is for folders and buckets.")


def _check_remote(mount: FileMount, where: str, *, runs_here: bool) -> None:
    assert mount.source is not None
    with _located(where):
        check_endpoint(mount.source, "The task file")
        open_store(mount.source)
    if runs_here and mount.mode is MountMode.MOUNT:
        _check_rclone(where, mount.source)


def _may_be_there(url: str) -> bool:
    """Return False if nothing exists at a URL. True if this user cannot read it: the job may."""
    try:
        return exists(url)
    except RetryLater:
        return True


def _check_rclone(where: str, source: str) -> None:
    if lacking := fuse.missing_programs():
        raise Unsupported(f"{where}: {fuse.missing_message(source, lacking)} Nothing was started.")


def fetch_limit(mount: FileMount) -> int | None:
    """Return the limit of a mount in bytes, or None without one."""
    config = (mount.spec.get("config") or {}).get("mount_cached") or {}
    value = config.get("vfs_cache_max_size", _DEFAULT)
    if str(value) in ("off", "-1"):
        return None
    mib = memory_mib(value)
    if mib is None:
        raise InvalidInput(f"{KEY}: expected a size, such as 50G, or off, found {value!r}.")
    return mib << 20


def check_fetch(place: str, limit: int | None) -> None:
    """Check that what a place holds is not more than a limit.

    Nothing is checked if the place does not answer: the mount does so too.

    Blocks: while the store responds.
    """
    if limit is None:
        return
    num_bytes = 0
    with suppress(Denied, NotFound, RetryLater):
        for entry in itertools.islice(open_store(place).list(), _MAX_LISTED):
            num_bytes += entry.num_bytes
    if num_bytes > limit:
        raise InvalidInput(
            f"{place} holds at least {format_bytes(num_bytes)}, which would be downloaded before `setup`, "
            f"and the limit is {format_bytes(limit)}. Mount a smaller prefix, or set {KEY} to another limit "
            "or to off. Nothing was started."
        )
