"""Mount plan of a task: checked before anything is started, then copied and recorded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.address import hide_secrets
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import Conflict, Denied, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.jobs.folder import JobFolder, bucket_folder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node.mounts.download import exists
from holdfast.jobs.node.mounts.mount_records import (
    Link,
    MountSpec,
    is_coverable,
    is_private_target,
    normal_target,
    private_mounts,
    why_not_mountable,
    why_unavailable,
)
from holdfast.jobs.node.workdir import check_copy, copy_file, copy_tree, left_out
from holdfast.jobs.task.model import FileMount, MountMode, Task, memory_mib
from holdfast.system.units import format_bytes

_OF_KERNEL = frozenset({"dev", "proc", "sys"})
_OF_PROGRAMS = frozenset({"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr"})
_OF_SYSTEM = frozenset({"home", "opt", "root", "run", "srv", "tmp", "var"})
"""Folders that an image has too, and that are hidden only if they are mounted as a whole."""
_LIMIT_KEY = "config.mount_cached.vfs_cache_max_size"
"""Key of a mount for its limit. SkyPilot limits the cache of rclone with it."""
_DEFAULT_LIMIT = "10G"  # as on SkyPilot
_MAX_LISTED = 10_000  # objects whose sizes are added up at the launch. The mount itself adds up all


def validate(task: Task, state: Path, *, runs_here: bool = True) -> None:
    """Check that all mounts of a task can be created, by this machine's programs if the job runs here.

    Sends nothing, as the file of a dry run may not be trusted.
    """
    for mount in task.file_mounts:
        with _located(task.where(mount.key)):
            _check_source(mount, state, runs_here=runs_here)
            target = normal_target(mount)
            if mount.is_inside:
                _check_inside(mount, state)
            elif target.is_absolute() and not mount.is_in_place:
                _check_target(target, state)
    private = [(mount, normal_target(mount)) for mount in private_mounts(task)]
    for (mount, target), (other, above) in itertools.permutations(private, 2):
        if target.is_relative_to(above):
            raise InvalidInput(
                f"{task.where(mount.key)}: it is at or below the target {other.target}. Choose another path. "
                "Nothing was started."
            )


def _check_source(mount: FileMount, state: Path, *, runs_here: bool) -> None:
    """Check that a mount has a usable source, and that this machine can mount it if the job runs here."""
    if mount.source is None and not mount.bucket:
        raise InvalidInput("expected a source or the name of a bucket, found neither.")
    if mount.source is None and "/" in (mount.bucket or ""):
        raise InvalidInput(f"expected the name of a bucket, found {mount.bucket!r}.")
    if mount.is_remote:
        assert mount.source is not None
        check_endpoint(mount.source, "The task file")
        open_store(mount.source)
        needs_fuse = runs_here and mount.mode is MountMode.MOUNT
        if needs_fuse and (why := why_not_mountable(mount.source)):
            raise Unsupported(f"{why} Nothing was started.")
    place = None if mount.is_remote else _local_place(mount, state)
    if mount.mode is MountMode.MOUNT_CACHED:
        _fetch_limit(mount)
        if place is not None and place.exists() and not place.is_dir():
            raise InvalidInput(f"{place} is a file; mode MOUNT_CACHED is for folders and buckets.")
    elif place is not None and mount.source is not None and not place.exists():
        raise NotFound(f"{place} does not exist. Nothing was started.")


def _check_target(target: Path, state: Path) -> None:
    """Check that a link can be created, or is possible as a private one."""
    if target.parts[1:2] and target.parts[1] in _OF_KERNEL:
        raise InvalidInput(f"/{target.parts[1]} is of the kernel. Choose another path.")
    if not is_private_target(target):
        is_free = not target.exists() or target.is_symlink()
    elif why := why_unavailable():
        raise Unsupported(
            f"you have no permission to create {target}, and a mount namespace, in which the job "
            f"could have it, is not possible on this machine: {why}. Choose a path below ~ or relative to "
            "the workdir, or ask the administrator to allow user namespaces. Nothing was started."
        )
    else:
        is_free = is_coverable(target, state)
    if not is_free:
        raise Conflict(f"{target} already exists, and was not changed. Choose another path.")


def _check_inside(mount: FileMount, state: Path) -> None:
    """Check a mount in a container: its target, and that its source does not hide files of the image."""
    parts = Path(os.path.normpath(mount.target)).parts
    if mount.target.startswith("/") and (len(parts) < 2 or parts[1] in _OF_KERNEL):
        raise InvalidInput(f"/{''.join(parts[1:2])} is of the kernel. Choose another path.")
    if mount.is_remote or mount.mode is not MountMode.MOUNT:
        return
    source = _local_place(mount, state).resolve()
    top = source.parts[1] if len(source.parts) > 1 else ""
    if (len(source.parts) <= 2 and top in _OF_SYSTEM | {""}) or top in _OF_KERNEL | _OF_PROGRAMS:
        raise Unsupported(
            f"{source} is mounted at its own path in the container too, and would hide what "
            "the image has. Copy it with `mode: COPY`, or move it below another folder. Nothing was started."
        )


def validate_sources(task: Task, state: Path) -> None:
    """Ask the stores whether the sources of copies exist, and those of caches are not too large."""
    for mount in task.file_mounts:
        with _located(task.where(mount.key)):
            if mount.mode is MountMode.MOUNT_CACHED:
                place = mount.source if mount.is_remote else None
                _check_fetch(place or str(_local_place(mount, state)), _fetch_limit(mount))
            elif mount.is_remote and mount.source is not None and mount.mode is MountMode.COPY:
                with suppress(RetryLater):  # this user cannot read it: the job may
                    if not exists(mount.source):
                        raise NotFound(
                            f"nothing exists at {hide_secrets(mount.source)}. Nothing was started."
                        )


@contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:
        raise type(error)(f"{where}: {error}") from error


def _local_place(mount: FileMount, state: Path) -> Path:
    """Return the folder on this machine that is mounted, or replaces a bucket."""
    if mount.source is None:
        return bucket_folder(state, mount.bucket or "")
    return Path(mount.source.removeprefix("file://")).expanduser().absolute()


def _fetch_limit(mount: FileMount) -> int | None:
    """Return the limit of a mount in bytes, or None without one."""
    config = (mount.spec.get("config") or {}).get("mount_cached") or {}
    value = config.get("vfs_cache_max_size", _DEFAULT_LIMIT)
    if str(value) in ("off", "-1"):
        return None
    mib = memory_mib(value)
    if mib is None:
        raise InvalidInput(f"{_LIMIT_KEY}: expected a size, such as 50G, or off, found {value!r}.")
    return mib << 20


def _check_fetch(place: str, limit: int | None) -> None:
    """Check that what a place holds is not more than a limit, if the place answers."""
    if limit is None:
        return
    num_bytes = 0
    with suppress(Denied, NotFound, RetryLater):  # the mount itself checks it too
        for entry in itertools.islice(open_store(place).list(), _MAX_LISTED):
            num_bytes += entry.num_bytes
    if num_bytes > limit:
        raise InvalidInput(
            f"{place} holds at least {format_bytes(num_bytes)}, which would be downloaded before `setup`, "
            f"and the limit is {format_bytes(limit)}. Mount a smaller prefix, or set {_LIMIT_KEY} to another "
            "limit or to off. Nothing was started."
        )


def place(task: Task, folder: JobFolder, state: Path, further: Iterable[Link] = ()) -> None:
    """Copy local files, and record the links and mounts of a job."""
    links, specs, private = list(further), [], list(private_mounts(task))
    for number, mount in enumerate(task.file_mounts):
        if mount.is_in_place:
            continue
        own = folder.copies / str(number)
        if mount.is_remote or mount.mode is MountMode.MOUNT_CACHED:
            specs.append(_spec(mount, own, state))
            source = own
        else:
            source = _local_place(mount, state)
            if mount.source is None:
                source.mkdir(parents=True, exist_ok=True)
            if mount.mode is MountMode.COPY:
                _copy(source, own, task, mount, folder)
                source = own
        if mount.is_inside and mount.target.startswith(("/", "~")):
            links.append(Link(mount.target, str(source), mount.target, is_inside=True))
            continue
        target = Path(mount.target).expanduser()  # one link, or one in each workdir
        starts = (
            [Path()] if target.is_absolute() else [folder.workdir(rank) for rank in range(task.num_nodes)]
        )
        paths = [os.path.normpath(start / target) for start in starts]
        links += [Link(path, str(source), mount.target, mount in private) for path in paths]
    write_document(folder.links, links)
    write_document(folder.mounts, specs)


def _copy(source: Path, to: Path, task: Task, mount: FileMount, job: JobFolder) -> None:
    way_out = "Mount a smaller folder, or use its path in the commands."
    check_copy(source, left_out(job), task.envs, num_copies=1, what=task.where(mount.key), way_out=way_out)
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        copy_tree(source, to, left_out(job))
    else:
        copy_file(source, to)


def _spec(mount: FileMount, path: Path, state: Path) -> MountSpec:
    place = mount.source if mount.is_remote else str(_local_place(mount, state))
    assert place is not None
    config: Any = mount.spec.get("config") or {}
    is_dataset = str(mount.spec.get("type", "")).upper() == "DATASET_RO"
    return MountSpec(
        mount.mode,
        place,
        str(path),
        mount.target,
        is_read_only=bool((config.get("mount") or {}).get("read_only")) or is_dataset,
        fetch_bytes=_fetch_limit(mount),
    )
