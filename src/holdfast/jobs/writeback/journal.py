"""Journal of a directory in SQLite: the upload queue and completed uploads, which survive a kill."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec import to_builtins
from msgspec.structs import astuple

from holdfast.errors import Corrupt, NotFound, RetryLater
from holdfast.jobs.writeback.files import Fingerprint
from holdfast.jobs.writeback.upload_queue import (
    JournalWrite,
    Sent,
    Upload,
    UploadProblem,
    UploadQueue,
    Version,
)
from holdfast.system.documents import decode, read_as, refuse, shown
from holdfast.system.log import get_logger

FOLDER = ".holdfast-writeback"
"""Folder in the directory for journal, kept versions and locks. On the same disk, for hard links."""
FILE, VERSION = "journal.sqlite", "1"
_WAIT_S = 30.0  # for another process's transaction

_COLUMNS = {
    "entry": ("number", "name", "source", "form", "bytes", "changed_ns", "inode", "digest"),
    "sent": ("name", "bytes", "changed_ns", "inode", "digest"),
    "problem": ("name", "bytes", "changed_ns", "inode", "kind", "why"),
}
_TABLES = """
CREATE TABLE IF NOT EXISTS fact (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entry (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, source TEXT NOT NULL, form TEXT,
    bytes INTEGER, changed_ns INTEGER, inode INTEGER, digest TEXT);
CREATE TABLE IF NOT EXISTS sent (
    name TEXT PRIMARY KEY, bytes INTEGER, changed_ns INTEGER, inode INTEGER, digest TEXT);
CREATE TABLE IF NOT EXISTS problem (
    name TEXT PRIMARY KEY, bytes INTEGER, changed_ns INTEGER, inode INTEGER, kind TEXT, why TEXT);
"""


class Journal:
    """Journal of one directory. One process writes it, and any process may read it."""

    def __init__(self, directory: Path, *, is_reader: bool = False) -> None:
        self._path = directory / FOLDER / FILE
        self._lock = threading.Lock()
        if is_reader and not self._path.is_file():
            raise NotFound(f"{directory} is not a write-back directory: it has no {FOLDER}/{FILE}.")
        with self._translate_errors():
            # A reader also opens the file for writing, as SQLite's log needs that after a kill, but writes
            # nothing.
            self._base = sqlite3.connect(
                self._path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA trusted_schema=OFF")
            self._check_schema()
            if not is_reader:
                self._base.execute("PRAGMA journal_mode=WAL")
                self._base.execute("PRAGMA synchronous=NORMAL")
                self._base.executescript(_TABLES)
        if self.get("version", VERSION) != VERSION:
            what = f"{self._path} has an unknown version"
            raise Corrupt(f"{what}. Nothing was changed. Use the Holdfast that created it.")
        if not is_reader:
            self.set(version=VERSION)

    def _check_schema(self) -> None:
        """Check that the database has no views or triggers, which could run for any time."""
        kinds = {row[0] for row in self._base.execute("SELECT DISTINCT type FROM sqlite_master")}
        if kinds - {"table", "index"}:
            found = ", a ".join(sorted(map(str, kinds)))
            raise Corrupt(f"{self._path} is not a journal: it holds a {found}.")

    def close(self) -> None:
        """Close the database."""
        self._base.close()

    def get(self, key: str, default: str = "") -> str:
        """Return the value of a setting or state of the mount."""
        with self._translate_errors():
            row = self._base.execute("SELECT value FROM fact WHERE key = ?", (key,)).fetchone()
        value = row[0] if row else default
        if type(value) is not str:
            refuse(str(self._path), f"the fact {key}", "a text", value)
        return value

    def set(self, **facts: str) -> None:
        """Write settings or states of the mount."""
        with self._translate_errors(), self._transaction():
            self._base.executemany("INSERT OR REPLACE INTO fact VALUES (?, ?)", facts.items())

    def write(self, writes: Iterable[JournalWrite]) -> None:
        """Apply writes in one transaction, so that they survive a kill of this process."""
        with self._translate_errors(), self._transaction():
            for write in writes:
                self._write(write)

    def load(self) -> UploadQueue:
        """Return the upload queue in the journal, from one transaction."""
        with self._translate_errors(), self._transaction():
            entries = {row[0]: _entry(row) for row in self._rows("entry")}
            sent = {row[0]: Sent(Fingerprint(*row[1:4]), row[4]) for row in self._rows("sent")}
            problems = {
                row[0]: UploadProblem(row[4], row[5], Fingerprint(*row[1:4])) for row in self._rows("problem")
            }
            last = self._base.execute("SELECT value FROM fact WHERE key = 'last'").fetchone()
        _check_rows(self._path, entries, sent, problems)
        number = decode(str(last[0]), str(self._path)) if last else 0
        if type(number) is not int:
            refuse(str(self._path), "the last number", "an integer", number)
        return UploadQueue(entries, sent, problems, max([number, *entries]))

    def _rows(self, table: str) -> sqlite3.Cursor:
        # By the number of an entry. Others are in the order of the queue.
        return self._base.execute(f"SELECT {', '.join(_COLUMNS[table])} FROM {table} ORDER BY rowid")

    def _write(self, write: JournalWrite) -> None:
        key, *others = _COLUMNS[write.table]
        if write.value is None:
            self._base.execute(f"DELETE FROM {write.table} WHERE {key} = ?", (write.key,))
            return
        row = _row(write.key, write.value)
        # Unlike REPLACE, this keeps the place of a row, as a dictionary does.
        changes = ", ".join(f"{name} = excluded.{name}" for name in others)
        values = ", ".join("?" * len(row))
        into = f"{write.table} ({', '.join(_COLUMNS[write.table])})"
        statement = f"INSERT INTO {into} VALUES ({values}) ON CONFLICT ({key}) DO UPDATE SET {changes}"
        self._base.execute(statement, row)
        if isinstance(write.value, Upload):  # no number is used twice, as kept versions are named by it
            self._base.execute("INSERT OR REPLACE INTO fact VALUES ('last', ?)", (str(write.key),))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._base.execute("BEGIN")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if any(word in str(error).lower() for word in ("decode", "malformed", "no such column")):
                raise Corrupt(f"{self._path} is damaged: {error}. Move it away and mount again.") from error
            if "no such table" in str(error):
                raise NotFound(f"{self._path} is empty: its directory was never mounted.") from error
            raise RetryLater(f"Cannot use the journal {self._path}: {error}.") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError) as error:
            raise Corrupt(f"{self._path} is damaged: {error}. Move it away and mount again.") from error


def _check_rows(path: Path, *tables: Mapping[Any, Upload | Sent | UploadProblem]) -> None:
    """Check the types of a journal's values, as SQLite stores any value in any column."""
    for key, row in (pair for table in tables for pair in table.items()):
        what = f"{path}: {shown(key)}"
        if type(key) is not (int if isinstance(row, Upload) else str):
            refuse(str(path), "a key", "of another type", key)
        read_as(type(row), to_builtins(row), what)


def _row(key: int | str, value: Upload | Sent | UploadProblem) -> tuple[object, ...]:
    if not isinstance(value, Upload):
        ends = (value.digest,) if isinstance(value, Sent) else (value.kind, value.why)
        return (key, *astuple(value.fingerprint), *ends)
    version = value.version
    kept = (None,) * 5
    if version is not None:
        kept = (version.form, *astuple(version.fingerprint), version.digest)
    return (key, value.name, value.source, *kept)


def _entry(row: tuple[Any, ...]) -> Upload:
    number, name, source, form, num_bytes, changed_ns, inode, digest = row
    if form is None:
        return Upload(number, name, None, source)
    return Upload(number, name, Version(form, Fingerprint(num_bytes, changed_ns, inode), digest), source)


_T = TypeVar("_T")
_log = get_logger("jobs.writeback")
_PAUSE_S = 1.0


class JournaledQueue:
    """Upload queue of one directory, shared by the uploader's threads and stored in its journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.order: UploadQueue = journal.load()
        self.changed = threading.Condition(threading.RLock())
        self._trouble = journal.get("trouble")

    def do(self, transition: Callable[[UploadQueue], _T]) -> _T:
        """Change the queue, record the change in the journal, and return the result of the transition.

        Blocks: while the journal cannot be written. Until then, a kill loses the change.
        """
        with self.changed:
            result = transition(self.order)
            while self.order.writes:
                try:
                    self.journal.write(self.order.writes)
                    self.order.writes.clear()
                except RetryLater as error:
                    _log.warning("%s Trying again.", error)
                    time.sleep(_PAUSE_S)
            self.changed.notify_all()
        return result

    def start_next(self, timeout_s: float) -> Upload | None:
        """Return the upload to do next, marked as started, or None."""
        with self.changed:
            if not self.order.entries:
                self.changed.wait(timeout_s)
            entry = self.order.first()
            if entry is not None:
                self.order.begun = entry.number
            return entry

    def set_problem(self, trouble: str) -> None:
        """Record why the first upload fails, for readers of the status. An empty string clears it."""
        if trouble == self._trouble:
            return
        if trouble:
            _log.warning(trouble)
        try:
            self.journal.set(trouble=trouble, trouble_unix_s=str(time.time()))
        except RetryLater as error:
            _log.error(error)
            return
        self._trouble = trouble
