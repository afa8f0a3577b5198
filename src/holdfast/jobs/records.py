"""Records of all jobs in one SQLite file: what was submitted, the state, and open requests."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.documents import decode_dataclass
from holdfast.errors import Conflict, NotFound, RetryLater
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.timers import Timers

_BUSY_S = 30.0
_VERSION = 2
_HIDDEN = 2  # value of is_whole while the folder is being removed
_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    task_id TEXT,
    is_whole INTEGER NOT NULL DEFAULT 0,  -- its folder is complete; before that the job does not exist
    spec TEXT NOT NULL,
    terms TEXT NOT NULL,
    life TEXT NOT NULL,
    due TEXT NOT NULL,
    status TEXT NOT NULL,
    step_before INTEGER,  -- newest checkpoint when the attempt began
    submitted_unix_s REAL NOT NULL,
    started_unix_s REAL,
    ended_unix_s REAL,
    engine TEXT NOT NULL DEFAULT 'local',
    outer_id TEXT  -- what the engine calls it
);
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs(id),
    kind TEXT NOT NULL,
    lead_s REAL,
    is_done INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS open_requests ON requests(job) WHERE is_done = 0;
"""
_STEPS = {
    1: """
ALTER TABLE jobs ADD COLUMN engine TEXT NOT NULL DEFAULT 'local';
ALTER TABLE jobs ADD COLUMN outer_id TEXT;
"""
}
"""Statements that upgrade a file of each version to the next."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Submitted job. Never changes."""

    num_nodes: int
    num_gpus: int
    has_setup: bool
    user: str
    gpus: list[list[str]]  # devices reserved for each node, or empty lists


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Record of one job."""

    id: int
    name: str
    task_id: str
    spec: JobSpec
    policy: RestartPolicy
    life: JobState
    due: Timers
    step_before: int | None
    submitted_unix_s: float
    started_unix_s: float | None
    ended_unix_s: float | None
    engine: str = "local"
    engine_job_id: str | None = None  # the engine's own id of the job


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Request of a command to a job."""

    id: int
    kind: str  # cancel or preempt
    lead_s: float | None


class Records:
    """Database of jobs, opened for one process.

    Raises:
        RetryLater: the file cannot be opened, or was locked for too long.
        Conflict: the file was created by a newer version of Holdfast.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._translate_errors():
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise Conflict(
                    f"{path} was created by a newer version of Holdfast (version {version}, supported here: "
                    f"{_VERSION}). Use that version, or set HOLDFAST_STATE to another folder."
                )
            if version < _VERSION:
                self._upgrade()

    def _upgrade(self) -> None:
        """Create the tables or upgrade those of an older version, in one transaction."""
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[
                0
            ]  # another process may have upgraded
            steps = [_TABLES] if version == 0 else [_STEPS[one] for one in range(version, _VERSION)]
            for statement in filter(str.strip, "\n".join(steps).split(";\n")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- jobs ------------------------------------------------------------------------------------------------

    def reserve(
        self, name: str, spec: JobSpec, policy: RestartPolicy, now_unix_s: float, *, engine: str = "local"
    ) -> int:
        """Reserve an id for a job. It is not listed before `complete`."""
        life, due = JobState(), Timers()
        row = (name, encode(spec), encode(policy), encode(life), encode(due), life.status.value)
        with self._translate_errors():
            cursor = self._db.execute(
                "INSERT INTO jobs (name, spec, terms, life, due, status, submitted_unix_s, engine) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, now_unix_s, engine),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def complete(self, number: int, task_id: str) -> None:
        """Mark a job as complete, which makes it visible."""
        with self._translate_errors():
            self._db.execute("UPDATE jobs SET task_id = ?, is_whole = 1 WHERE id = ?", (task_id, number))

    def withdraw(self, number: int) -> None:
        """Hide a job that its engine did not accept."""
        with self._translate_errors():
            self._db.execute("UPDATE jobs SET is_whole = 0 WHERE id = ?", (number,))

    def set_engine_job_id(self, number: int, engine_job_id: str) -> None:
        """Record the engine's own id of a job."""
        with self._translate_errors():
            self._db.execute("UPDATE jobs SET outer_id = ? WHERE id = ?", (engine_job_id, number))

    def hide(self, number: int) -> None:
        """Hide a job while its folder is removed."""
        with self._translate_errors():
            self._db.execute("UPDATE jobs SET is_whole = ? WHERE id = ?", (_HIDDEN, number))

    def hidden(self) -> list[int]:
        """Return the ids of jobs that are hidden but not yet removed."""
        with self._translate_errors():
            return [row[0] for row in self._db.execute("SELECT id FROM jobs WHERE is_whole = ?", (_HIDDEN,))]

    def forget(self, number: int) -> None:
        """Remove a job. Its id is never reused."""
        with self._translate_errors(), self._transaction():
            self._db.execute("DELETE FROM requests WHERE job = ?", (number,))
            self._db.execute("DELETE FROM jobs WHERE id = ?", (number,))

    def get(self, number: int) -> JobRecord:
        """Return a job's record.

        Raises:
            NotFound: the job does not exist.
        """
        with self._translate_errors():
            row = self._db.execute(f"{_SELECT} AND id = ?", (number,)).fetchone()
        if row is None:
            raise NotFound(f"Job {number} does not exist. See `holdfast queue`.")
        return _record(row)

    def all(self, engine: str | None = None) -> list[JobRecord]:
        """Return the records of all jobs, or of one engine's, oldest first."""
        with self._translate_errors():
            rows = self._db.execute(f"{_SELECT} AND ? IN (engine, '') ORDER BY id", (engine or "",))
            return [_record(row) for row in rows]

    def save(
        self,
        number: int,
        life: JobState,
        due: Timers,
        *,
        now_unix_s: float,
        step_before: int | None,
        answered: int | None = None,
        started_unix_s: float | None = None,
    ) -> None:
        """Record a job's state and timers, and mark a request as answered, in one transaction.

        Also records the start of the first attempt, as `started_unix_s` or now.
        """
        started = (started_unix_s or now_unix_s) if life.attempt else None
        ended = now_unix_s if life.status.is_final else None
        with self._translate_errors(), self._transaction():
            self._db.execute(
                "UPDATE jobs SET life = ?, due = ?, status = ?, step_before = ?, "
                "started_unix_s = coalesce(started_unix_s, ?), ended_unix_s = coalesce(ended_unix_s, ?) "
                "WHERE id = ?",
                (encode(life), encode(due), life.status.value, step_before, started, ended, number),
            )
            if answered is not None:
                self._db.execute("UPDATE requests SET is_done = 1 WHERE id = ?", (answered,))

    # -- requests --------------------------------------------------------------------------------------------

    def ask(self, number: int, kind: str, lead_s: float | None = None) -> None:
        """Add a request to a job's controller."""
        with self._translate_errors():
            self._db.execute(
                "INSERT INTO requests (job, kind, lead_s) VALUES (?, ?, ?)", (number, kind, lead_s)
            )

    def requests(self, number: int) -> list[JobRequest]:
        """Return the open requests to a job."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT id, kind, lead_s FROM requests WHERE job = ? AND is_done = 0 ORDER BY id", (number,)
            )
            return [JobRequest(*row) for row in rows]

    # -- the file --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RetryLater(f"Cannot use the job records in {self._path}: {error}.") from error


_SELECT = (
    "SELECT id, name, task_id, spec, terms, life, due, step_before, submitted_unix_s, started_unix_s, "
    "ended_unix_s, engine, outer_id FROM jobs WHERE is_whole = 1"
)


# -- JSON ------------------------------------------------------------------------------------------------


def encode(value: JobSpec | Timers | RestartPolicy | JobState) -> str:
    """Return a part of a record as JSON."""
    return json.dumps(asdict(value), default=sorted)  # a set becomes a list


def _record(row: tuple[Any, ...]) -> JobRecord:
    number, name, task_id, spec, policy, life, due, *rest = row
    return JobRecord(
        number,
        name,
        task_id,
        decode_dataclass(JobSpec, spec, "a submitted job", any_text=True),
        decode_dataclass(RestartPolicy, policy, "the restart policy of a job"),
        decode_dataclass(JobState, life, "the state of a job", any_text=True),
        decode_dataclass(Timers, due, "the timers of a job", any_text=True),
        *rest,
    )
