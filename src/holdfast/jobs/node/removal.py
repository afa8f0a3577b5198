"""Removal of jobs that have ended: their folders and records, but no contents of buckets."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from holdfast.errors import Conflict, RetryLater
from holdfast.jobs.environment import tag
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.node import processes
from holdfast.jobs.node.containers.lease import containers, release_containers
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.links import remove_links
from holdfast.jobs.node.mounts.uploads import upload_status
from holdfast.jobs.records import JobRecord, Records
from holdfast.system.linux import locks

_LOCK_LIMIT_S = 10.0
_POLL_S = 0.02
_CONTAINERS_LIMIT_S = 60.0


def remove(records: Records, state: Path, number: int, *, force: bool) -> None:
    """Remove a job. First completes removals that were interrupted."""
    for left in records.folders_set_aside():
        _remove(left)
    record = records.get(number)
    folder = job_folder(state, number)
    lock = _lock(folder, record)
    try:
        _check(records, record, has_lock=lock is not None)
        if not force and (summary := upload_status(folder).summary):
            raise Conflict(
                f"Job {number} was not removed: {summary}. `holdfast drain` waits for uploads. "
                "With --force these files are lost."
            )
        _remove_containers(folder, number)
        # Before anything is removed: below a mount are the bucket's files.
        fuse.unmount_below(folder.path)
        remove_links(folder)
        _remove(records.set_aside(number))
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: JobFolder, record: JobRecord) -> int | None:
    """Acquire the controller's lock. Waits if the job has only just ended."""
    give_up_s = time.monotonic() + (_LOCK_LIMIT_S if record.job_state.status.is_final else 0.0)
    while (lock := locks.acquire(folder.lock)) is None and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    return lock


def _check(records: Records, record: JobRecord, *, has_lock: bool) -> None:
    """Check that a job has ended, that none of its processes is running, and that no other job needs it."""
    if not record.job_state.status.is_final or not has_lock:
        raise Conflict(
            f"Job {record.id} is {record.job_state.status.value}, so it was not removed. Use "
            f"`holdfast cancel {record.id}` to end it."
        )
    if left := processes.tagged(tag(record.task_id), processes.snapshot()):
        pids = ", ".join(str(one.pid) for one in left[:5])
        raise Conflict(
            f"Job {record.id} has ended, but some of its processes are still finishing (pid {pids}). "
            "It was not removed. Try again when they are gone."
        )
    for one in records.successors(record.id):
        if not one.job_state.status.is_final:
            raise Conflict(
                f"Job {record.id} comes before job {one.id} ({one.name}) in a pipeline, so it was not "
                "removed. Remove it when that job has ended."
            )


def _remove_containers(folder: JobFolder, number: int) -> None:
    """Wait until the containers of a job are removed, which its wardens do."""
    release_containers(folder)
    give_up_s = time.monotonic() + _CONTAINERS_LIMIT_S
    while left := containers(folder):
        if time.monotonic() > give_up_s or not any(locks.is_held(one.lock) for _, one in left):
            raise RetryLater(
                f"Job {number} was not removed: its container on node {left[0][0]} could not be removed "
                f"(see {folder.log(left[0][0])}). Try again, or remove the container yourself."
            )
        time.sleep(_POLL_S)


def _remove(folder: Path) -> None:
    """Remove a folder that was set aside."""
    if mounted := fuse.mounted_below(folder):
        raise Conflict(f"{mounted[0]} is mounted, so {folder} was not removed.")
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RetryLater(
            f"Cannot remove {folder}: {error}. The job is no longer listed. The next `holdfast "
            "forget` tries again, or remove the folder yourself."
        ) from error
