"""The records of all jobs in one SQLite file: what each is, where it stands, what is asked of it."""

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
from holdfast.jobs.due import Due
from holdfast.jobs.machine import Life, Terms
from holdfast.jobs.outcome import Outcome

_BUSY_S = 30.0
_VERSION = 2
_HIDDEN = 2  # as is_whole: the folder is being removed
_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    task_id TEXT,
    is_whole INTEGER NOT NULL DEFAULT 0,  -- its folder is there; until then it is no job
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
""",
}
"""What makes a file of each version one of the next."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What was submitted; it never changes."""

    num_nodes: int
    num_gpus: int
    has_setup: bool
    user: str
    gpus: list[list[str]]  # devices of each node alone; empty where they are not shared out


@dataclass(frozen=True, slots=True)
class Record:
    """One job."""

    id: int
    name: str
    task_id: str
    spec: Spec
    terms: Terms
    life: Life
    due: Due
    step_before: int | None
    submitted_unix_s: float
    started_unix_s: float | None
    ended_unix_s: float | None
    engine: str = "local"
    outer_id: str | None = None  # what the engine calls it, if that is not our number


@dataclass(frozen=True, slots=True)
class Request:
    """What a command asks of a job."""

    id: int
    kind: str  # cancel or preempt
    lead_s: float | None


class Records:
    """The file, opened for one process.

    Raises:
        RetryLater: it cannot be opened, or others held it for too long.
        Conflict: a newer version of Holdfast has made it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise Conflict(
                    f"{path} was made by a newer version of Holdfast (version {version}, known here: "
                    f"{_VERSION}). Use that version, or another folder with HOLDFAST_STATE."
                )
            if version < _VERSION:
                self._bring_up()

    def _bring_up(self) -> None:
        """Make the tables, or those of an older version into this one's; all or nothing."""
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]  # others may have done it by now
            steps = [_TABLES] if version == 0 else [_STEPS[one] for one in range(version, _VERSION)]
            for statement in filter(str.strip, "\n".join(steps).split(";\n")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- jobs ------------------------------------------------------------------------------------------------

    def reserve(
        self, name: str, spec: Spec, terms: Terms, now_unix_s: float, *, engine: str = "local"
    ) -> int:
        """A number for a job that is being put together; nobody sees it before `complete`."""
        life, due = Life(), Due()
        row = (name, _text(spec), terms_text(terms), life_text(life), _text(due), life.status.value)
        with self._told():
            cursor = self._db.execute(
                "INSERT INTO jobs (name, spec, terms, life, due, status, submitted_unix_s, engine) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, now_unix_s, engine),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def complete(self, number: int, task_id: str) -> None:
        """From now on the job is there."""
        with self._told():
            self._db.execute("UPDATE jobs SET task_id = ?, is_whole = 1 WHERE id = ?", (task_id, number))

    def take_back(self, number: int) -> None:
        """The job is there no more: its engine has not taken it."""
        with self._told():
            self._db.execute("UPDATE jobs SET is_whole = 0 WHERE id = ?", (number,))

    def name_outside(self, number: int, outer_id: str) -> None:
        """Write down what the engine calls the job."""
        with self._told():
            self._db.execute("UPDATE jobs SET outer_id = ? WHERE id = ?", (outer_id, number))

    def hide(self, number: int) -> None:
        """From now on the job is not there; its folder may still be."""
        with self._told():
            self._db.execute("UPDATE jobs SET is_whole = ? WHERE id = ?", (_HIDDEN, number))

    def hidden(self) -> list[int]:
        """Numbers of jobs that were hidden and not yet forgotten."""
        with self._told():
            return [row[0] for row in self._db.execute("SELECT id FROM jobs WHERE is_whole = ?", (_HIDDEN,))]

    def forget(self, number: int) -> None:
        """Nothing is left of the job; its number is given to no other."""
        with self._told(), self._transaction():
            self._db.execute("DELETE FROM requests WHERE job = ?", (number,))
            self._db.execute("DELETE FROM jobs WHERE id = ?", (number,))

    def get(self, number: int) -> Record:
        """One job.

        Raises:
            NotFound: there is none with this number.
        """
        with self._told():
            row = self._db.execute(f"{_SELECT} AND id = ?", (number,)).fetchone()
        if row is None:
            raise NotFound(f"There is no job {number}. `holdfast queue` lists those there are.")
        return _record(row)

    def all(self, engine: str | None = None) -> list[Record]:
        """All jobs, or those of one engine, the oldest first."""
        with self._told():
            rows = self._db.execute(f"{_SELECT} AND ? IN (engine, '') ORDER BY id", (engine or "",))
            return [_record(row) for row in rows]

    def save(
        self,
        number: int,
        life: Life,
        due: Due,
        *,
        now_unix_s: float,
        step_before: int | None,
        answered: int | None = None,
        started_unix_s: float | None = None,
    ) -> None:
        """Write down where a job stands, what is due, and which request that answers, all or nothing.

        Its first attempt has begun now, or at `started_unix_s`, if that is not written down yet.
        """
        started = (started_unix_s or now_unix_s) if life.attempt else None
        ended = now_unix_s if life.status.is_final else None
        with self._told(), self._transaction():
            self._db.execute(
                "UPDATE jobs SET life = ?, due = ?, status = ?, step_before = ?, "
                "started_unix_s = coalesce(started_unix_s, ?), ended_unix_s = coalesce(ended_unix_s, ?) "
                "WHERE id = ?",
                (life_text(life), _text(due), life.status.value, step_before, started, ended, number),
            )
            if answered is not None:
                self._db.execute("UPDATE requests SET is_done = 1 WHERE id = ?", (answered,))

    # -- requests --------------------------------------------------------------------------------------------

    def ask(self, number: int, kind: str, lead_s: float | None = None) -> None:
        """Ask something of a job's controller."""
        with self._told():
            self._db.execute(
                "INSERT INTO requests (job, kind, lead_s) VALUES (?, ?, ?)", (number, kind, lead_s)
            )

    def requests(self, number: int) -> list[Request]:
        """What is asked of a job and not yet answered."""
        with self._told():
            rows = self._db.execute(
                "SELECT id, kind, lead_s FROM requests WHERE job = ? AND is_done = 0 ORDER BY id", (number,)
            )
            return [Request(*row) for row in rows]

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
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RetryLater(f"The records of jobs in {self._path} could not be used: {error}.") from error


_SELECT = (
    "SELECT id, name, task_id, spec, terms, life, due, step_before, submitted_unix_s, started_unix_s, "
    "ended_unix_s, engine, outer_id FROM jobs WHERE is_whole = 1"
)


# -- values as JSON --------------------------------------------------------------------------------------


def _text(value: Spec | Due) -> str:
    return json.dumps(asdict(value))


def terms_text(terms: Terms) -> str:
    """What is allowed to a job, as JSON."""
    return json.dumps({**asdict(terms), "free_codes": sorted(terms.free_codes)})


def read_terms(text: str) -> Terms:
    """See `terms_text`."""
    return decode_dataclass(Terms, text, "the terms of a job")


def life_text(life: Life) -> str:
    """Where a job stands, as JSON."""
    outcomes = {str(node): _outcome_told(one) for node, one in life.outcomes.items()}
    told = {name: getattr(life, name) for name in Life.__dataclass_fields__}
    return json.dumps({**told, "status": life.status.value, "outcomes": outcomes})


def _outcome_told(outcome: Outcome) -> dict[str, Any]:
    return {
        "phase": outcome.phase.value,
        "code": outcome.code,
        "killed_by": outcome.killed_by,
        "is_stopped": outcome.is_stopped,
    }


def read_life(text: str) -> Life:
    """See `life_text`."""
    return decode_dataclass(Life, text, "the state of a job", any_text=True)


def _record(row: tuple[Any, ...]) -> Record:
    number, name, task_id, spec, terms, life, due, *rest = row
    return Record(
        number,
        name,
        task_id,
        decode_dataclass(Spec, spec, "what was submitted", any_text=True),
        read_terms(terms),
        read_life(life),
        decode_dataclass(Due, due, "what is due", any_text=True),
        *rest,
    )
