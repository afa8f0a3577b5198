"""Forgets jobs that have ended: their folder and their row; never a living one, never what is in a bucket."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from holdfast.errors import Conflict, RetryLater
from holdfast.jobs.environment import mark
from holdfast.jobs.node import locks, processes
from holdfast.jobs.node.folder import JobFolder, job_folder
from holdfast.jobs.node.mounts import fuse
from holdfast.jobs.node.mounts.drainer import look_at
from holdfast.jobs.node.mounts.link import detach
from holdfast.jobs.records import Record, Records

_LOCK_LIMIT_S = 10.0
_POLL_S = 0.02


def forget(records: Records, state: Path, number: int, *, force: bool) -> None:
    """Remove what is kept of a job; first what an earlier call that was killed has left half removed.

    Args:
        records: of all jobs.
        state: folder of all jobs.
        number: of the job.
        force: also if it wrote files that are not in their bucket.

    Raises:
        NotFound: no such job.
        Conflict: it has not ended, something of it is at work, or files would be lost.
        RetryLater: its folder could not be removed; it is told of no more, and the next call goes on.
    """
    for left in records.hidden():
        _remove(records, job_folder(state, left), left)
    record = records.get(number)
    folder = job_folder(state, number)
    lock = _lock(folder, record) if folder.path.exists() else None
    try:
        if folder.path.exists():
            _check_ended(record, has_lock=lock is not None)
            _check_quiet(record)
            if not force:
                _check_sent(folder, number)
            # Before anything is removed: below a mount is a bucket.
            fuse.unmount_below(folder.path)
            detach(folder)
        else:
            _check_ended(record, has_lock=True)
        records.hide(number)
        _remove(records, folder, number)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: JobFolder, record: Record) -> int | None:
    """The controller's lock; of a job that has ended just now it is waited for."""
    give_up_s = time.monotonic() + (_LOCK_LIMIT_S if record.life.status.is_final else 0.0)
    while (lock := locks.take(folder.lock)) is None and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    return lock


def _check_ended(record: Record, *, has_lock: bool) -> None:
    if not record.life.status.is_final or not has_lock:
        raise Conflict(
            f"Job {record.id} is {record.life.status.value}, and was left as it is. `holdfast cancel "
            f"{record.id}` ends it."
        )


def _check_quiet(record: Record) -> None:
    if left := processes.marked(mark(record.task_id), processes.living()):
        pids = ", ".join(str(one.pid) for one in left[:5])
        raise Conflict(
            f"Job {record.id} has ended, but processes of it still finish what they were given (pid {pids}). "
            "It was left as it is; try again when they are gone."
        )


def _check_sent(folder: JobFolder, number: int) -> None:
    unsent = look_at(folder)
    if unsent.told:
        raise Conflict(
            f"Job {number} was left as it is, since {unsent.told}. `holdfast drain` waits for what is still "
            "sent; with --force these files are lost."
        )


def _remove(records: Records, folder: JobFolder, number: int) -> None:
    if mounted := fuse.mounted_below(folder.path):
        raise Conflict(f"{mounted[0]} is mounted, so {folder.path} was not removed.")
    try:
        shutil.rmtree(folder.path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RetryLater(
            f"{folder.path} could not be removed: {error}. The job is told of no more; the next `holdfast "
            "forget` goes on, or remove the folder yourself."
        ) from error
    records.forget(number)
