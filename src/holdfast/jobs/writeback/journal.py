"""Journal of a directory in SQLite: the upload queue and completed uploads, which survive a kill."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import Corrupt, NotFound, RetryLater
from holdfast.jobs.writeback.upload_queue import Sent, Upload, UploadProblem, UploadQueue
from holdfast.system.documents import decode_as, read_as, shown, to_plain
from holdfast.system.log import get_logger

FOLDER = ".holdfast-writeback"
"""Folder in the directory for journal, kept versions and locks. On the same disk, for hard links."""
FILE, VERSION = "journal.sqlite", "2"
_WAIT_S = 30.0  # for another process's transaction
_PAUSE_S = 1.0

_KINDS = {"entry": (int, Upload), "sent": (str, Sent), "problem": (str, UploadProblem)}
"""Types of the keys and values of each table. A value is a text of JSON."""
_TABLES = """
CREATE TABLE IF NOT EXISTS fact (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS entry (key INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sent (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS problem (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_T = TypeVar("_T")
_log = get_logger("jobs.writeback")


class Journal:
    """Journal of one directory, which any process may read. Its only writer is a `JournaledQueue`."""

    def __init__(self, directory: Path, *, is_writer: bool = False) -> None:
        self._path = directory / FOLDER / FILE
        self._lock = threading.RLock()
        if not is_writer and not self._path.is_file():
            raise NotFound(f"{directory} is not a write-back directory: it has no {FOLDER}/{FILE}.")
        with self._translate_errors():
            # A reader also opens the file for writing, as SQLite's log needs that after a kill, but writes
            # nothing.
            self._base = sqlite3.connect(
                self._path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA trusted_schema=OFF")
            self._check_schema()
            if is_writer:
                self._base.execute("PRAGMA journal_mode=WAL")
                self._base.execute("PRAGMA synchronous=NORMAL")
                self._base.executescript(_TABLES)
        if self.get("version", VERSION) != VERSION:
            what = f"{self._path} has an unknown version"
            raise Corrupt(f"{what}. Nothing was changed. Use the Holdfast that created it.")

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
        return read_as(str, row[0] if row else default, f"{self._path}: the fact {key}")

    def load(self) -> UploadQueue:
        """Return the upload queue in the journal, from one transaction."""
        with self._transaction():
            entries, sent, problems = (dict(self._read(table)) for table in _KINDS)
            last = decode_as(int, self.get("last", "0"), f"{self._path}: the last number")
        return UploadQueue(entries, sent, problems, max([last, *entries]))

    def _read(self, table: str) -> Iterator[tuple[Any, Any]]:
        """Yield keys and values, whose types are checked, as SQLite stores any value in any column."""
        key_kind, kind = _KINDS[table]
        # By the number of an entry. Others are in the order of the queue.
        for key, text in self._base.execute(f"SELECT key, value FROM {table} ORDER BY rowid"):
            what = f"{self._path}: {shown(key)}"
            members = decode_as(dict[str, Any], read_as(str, text, what), what, any_text=True)
            yield read_as(key_kind, key, what), read_as(kind, {**members, "number": key}, what)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._translate_errors():
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


class JournaledQueue(Journal):
    """Upload queue of one directory, shared by the uploader's threads and stored in its journal.

    `facts` are written before the queue is read, which may take long: other processes look at them.
    """

    def __init__(self, directory: Path, **facts: str) -> None:
        super().__init__(directory, is_writer=True)
        self.changed = threading.Condition(self._lock)
        self.set(version=VERSION, trouble="", **facts)
        self._trouble = ""
        self.order: UploadQueue = self.load()

    def set(self, **facts: str) -> None:
        """Write settings or states of the mount."""
        with self._transaction():
            self._base.executemany("INSERT OR REPLACE INTO fact VALUES (?, ?)", facts.items())

    def do(self, transition: Callable[[UploadQueue], _T]) -> _T:
        """Change the queue, record the change in the journal, and return the result of the transition.

        Blocks: while the journal cannot be written. Until then, a kill loses the change.
        """
        with self.changed:
            result = transition(self.order)
            while self.order.writes:
                try:
                    with self._transaction():
                        for write in self.order.writes:
                            self._write(*write)
                    self.order.writes.clear()
                except RetryLater as error:
                    _log.warning("%s Trying again.", error)
                    time.sleep(_PAUSE_S)
            self.changed.notify()
        return result

    def _write(self, table: str, key: int | str, value: Upload | Sent | UploadProblem | None) -> None:
        if value is None:
            self._base.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
            return
        # Unlike REPLACE, this keeps the place of a row, as a dictionary does.
        update = "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        text = json.dumps(to_plain(value))
        self._base.execute(f"INSERT INTO {table} VALUES (?, ?) {update}", (key, text))
        if table == "entry":  # no number is used twice, as kept versions are named by it
            self._base.execute("INSERT OR REPLACE INTO fact VALUES ('last', ?)", (str(key),))

    def start_next(self, timeout_s: float, limit: int) -> Upload | None:
        """Return the upload to do next, marked as begun, or None. At most `limit` are begun side by side."""
        with self.changed:
            if (entry := self.order.begin(limit)) is None:
                self.changed.wait(timeout_s)
                entry = self.order.begin(limit)
            if entry is not None:
                self.changed.notify()  # another thread may begin the next
            return entry

    def set_problem(self, entry: Upload, trouble: str) -> None:
        """Record why the first upload fails, for readers of the status. An empty string clears it."""
        with self.changed:
            first = self.order.first()
            if trouble == self._trouble or (first is not None and first.number < entry.number):
                return
            if trouble:
                _log.warning(trouble)
            try:
                self.set(trouble=trouble, trouble_unix_s=str(time.time()))
            except RetryLater as error:
                _log.error(error)
                return
            self._trouble = trouble
