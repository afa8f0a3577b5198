"""Database of jobs of earlier versions, `jobs.db`: its jobs are taken over into their folders once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.documents import decode_dataclass
from holdfast.errors import Corrupt, RetryLater
from holdfast.jobs import job_numbers
from holdfast.jobs.node import processes
from holdfast.jobs.node.folder import JobFolder, job_folder, jobs_folder
from holdfast.jobs.record_files import (
    JobSpec,
    StoredState,
    Submission,
    add_request,
    append_state,
    write_submission,
)
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.timers import Timers
from holdfast.linux import locks
from holdfast.log import get_logger

_log = get_logger("jobs")

_NAME = "jobs.db"
_WHOLE, _HIDDEN = 1, 2  # values of is_whole: listed, and being removed
_LIMIT_S = 30.0
_POLL_S = 0.02


def take_over(state: Path) -> None:
    """Write the records of an earlier version's jobs into their folders, once.

    A job whose folder has a record already keeps that: an old copy of the database changes nothing. A job
    without a folder is left out. A database that cannot be read is set aside, and nothing is removed.

    Raises:
        OSError: a record cannot be written.
        RetryLater: a controller of the earlier version does not end.
    """
    path = state / _NAME
    if not path.exists():
        return
    jobs = jobs_folder(state)
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(jobs / "take-over.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():  # another process may have done it
            _take_over(path, state)
    finally:
        os.close(fd)


def _take_over(path: Path, state: Path) -> None:
    try:
        with contextlib.ExitStack() as held:
            for number in _open_jobs(path):
                held.enter_context(_without_controller(job_folder(state, number)))
            rows, requests, last = _read(path)
            for row in rows:
                _write(row, state)
            for number, kind, lead_s in requests:
                if job_folder(state, number).states.exists():
                    add_request(job_folder(state, number), kind, lead_s)
            job_numbers.skip_numbers(jobs_folder(state), last)
    except (sqlite3.Error, Corrupt, KeyError, ValueError) as error:
        kept = _set_aside(path, "unreadable")
        _log.warning(
            "%s of an earlier version cannot be read: %s. It was renamed to %s, and nothing was removed.",
            path,
            error,
            kept,
        )
        return
    kept = _set_aside(path, "old")
    _log.info("the jobs in %s are recorded in their folders now; the file was renamed to %s", path, kept)


# -- the database ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(path, timeout=_LIMIT_S, isolation_level=None)
    database.row_factory = sqlite3.Row
    try:
        yield database
    finally:
        database.close()


def _open_jobs(path: Path) -> list[int]:
    """Return the numbers of jobs that had not ended."""
    query = "SELECT id FROM jobs WHERE is_whole = ? AND ended_unix_s IS NULL"
    with _opened(path) as database:
        return [int(row["id"]) for row in database.execute(query, (_WHOLE,))]


def _read(path: Path) -> tuple[list[dict[str, object]], list[tuple[int, str, float | None]], int]:
    """Return the rows of all jobs, the open requests, and the last number."""
    with _opened(path) as database:
        rows = [dict(row) for row in database.execute("SELECT * FROM jobs WHERE is_whole > 0")]
        asked = database.execute("SELECT job, kind, lead_s FROM requests WHERE is_done = 0 ORDER BY id")
        requests = [(int(job), str(kind), lead_s) for job, kind, lead_s in asked]
        last = database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
    return rows, requests, 0 if last is None else int(last["seq"])


def _write(row: dict[str, object], state: Path) -> None:
    """Write the record of a job into its folder, unless that has one."""
    number = int(str(row["id"]))
    folder = job_folder(state, number)
    if not folder.path.is_dir() or any(path.exists() for path in folder.submissions):
        return
    if row["is_whole"] == _HIDDEN:
        job_numbers.set_aside(jobs_folder(state), number)
        return
    what = f"job {number} of {_NAME}"
    submission = Submission(
        number=number,
        name=str(row["name"]),
        task_id=str(row["task_id"]),
        engine=str(row.get("engine") or "local"),
        spec=decode_dataclass(JobSpec, str(row["spec"]), what, any_text=True),
        policy=decode_dataclass(RestartPolicy, str(row["terms"]), what),
        submitted_unix_s=_number(row["submitted_unix_s"]) or 0.0,
    )
    step, engine_job_id = row["step_before"], row.get("outer_id")
    stored = StoredState(
        unix_s=time.time(),
        life=decode_dataclass(JobState, str(row["life"]), what, any_text=True),
        due=decode_dataclass(Timers, str(row["due"]), what, any_text=True),
        step_before=int(str(step)) if step is not None else None,
        started_unix_s=_number(row["started_unix_s"]),
        ended_unix_s=_number(row["ended_unix_s"]),
        engine_job_id=str(engine_job_id) if engine_job_id is not None else None,
    )
    append_state(folder, stored)
    write_submission(folder, submission)


def _number(value: object) -> float | None:
    return float(str(value)) if value is not None else None


def _set_aside(path: Path, word: str) -> Path:
    """Rename a database and its companions, and return the new path."""
    number = 1
    while (to := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    for companion in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + companion).rename(to.with_name(to.name + companion))
    path.rename(to)
    return to


# -- controllers of the earlier version ------------------------------------------------------------------


@contextlib.contextmanager
def _without_controller(folder: JobFolder) -> Iterator[None]:
    """End the controller that uses the database, and let no other start during the block.

    The job's nodes continue, and its next controller adopts them.

    Raises:
        RetryLater: the controller does not end.
    """
    if not folder.path.is_dir() or any(path.exists() for path in folder.submissions):
        yield  # the controller, if any, is of this version
        return
    give_up_s = time.monotonic() + _LIMIT_S
    while (lock := locks.acquire(folder.lock)) is None:
        processes.kill(processes.controllers(folder.path))
        if time.monotonic() > give_up_s:
            raise RetryLater(f"The controller of the job in {folder.path} does not end.")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)
