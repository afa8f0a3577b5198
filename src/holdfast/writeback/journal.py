"""The journal: what is to be done and what has been, in SQLite, so that a kill loses neither."""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.documents import decode, read_dataclass, refuse, shown
from holdfast.errors import Corrupt, NotFound, RetryLater
from holdfast.writeback.files import Fingerprint
from holdfast.writeback.order import Deed, Entry, Order, Problem, Sent, Version

FOLDER = ".holdfast-writeback"
"""In the directory: journal, kept versions, lock. On the same disk, so that files can be linked there."""
FILE, VERSION = "journal.sqlite", "1"
_WAIT_S = 30.0  # for another process's transaction

_ENTRY = "number, name, source, form, bytes, changed_ns, inode, digest"
_SENT = "name, bytes, changed_ns, inode, digest"
_PROBLEM = "name, bytes, changed_ns, inode, kind, why"
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
    """The journal of one directory; one process writes it, any may read.

    Args:
        directory: the write-back directory.
        is_reader: True for those who only look.

    Raises:
        NotFound: only to be read, and there is none.
        RetryLater: the disk is full, or does not answer.
        Corrupt: it is no journal of this version.
    """

    def __init__(self, directory: Path, *, is_reader: bool = False) -> None:
        self._path = directory / FOLDER / FILE
        self._lock = threading.Lock()
        if is_reader and not self._path.is_file():
            raise NotFound(f"{directory} is not a write-back directory: it has no {FOLDER}/{FILE}.")
        with self._refusing():
            # A reader opens it for writing too: SQLite's log needs that after a kill, and nothing is written.
            self._base = sqlite3.connect(
                self._path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA trusted_schema=OFF")
            self._check_schema()
            if not is_reader:
                self._base.execute("PRAGMA journal_mode=WAL")
                self._base.execute("PRAGMA synchronous=NORMAL")
                self._base.executescript(_TABLES)
        if self.fact("version", VERSION) != VERSION:
            raise Corrupt(
                f"{self._path} is of a version that this Holdfast does not know. Nothing was changed."
            )
        if not is_reader:
            self.state(version=VERSION)

    def _check_schema(self) -> None:
        """Refuse a database with views or triggers, which could run for any time.

        Raises:
            Corrupt: it has some.
        """
        kinds = {row[0] for row in self._base.execute("SELECT DISTINCT type FROM sqlite_master")}
        if kinds - {"table", "index"}:
            raise Corrupt(f"{self._path} is no journal: it holds a {', a '.join(sorted(map(str, kinds)))}.")

    def close(self) -> None:
        """Give up the file."""
        self._base.close()

    def fact(self, key: str, default: str = "") -> str:
        """One fact about the mount."""
        with self._refusing():
            row = self._base.execute("SELECT value FROM fact WHERE key = ?", (key,)).fetchone()
        value = row[0] if row else default
        if type(value) is not str:
            refuse(str(self._path), f"the fact {key}", "a text", value)
        return value

    def state(self, **facts: str) -> None:
        """Write facts about the mount."""
        with self._refusing(), self._transaction():
            self._base.executemany("INSERT OR REPLACE INTO fact VALUES (?, ?)", facts.items())

    def write(self, deeds: Iterable[Deed]) -> None:
        """Make deeds survive a kill of this process, all of them or none."""
        with self._refusing(), self._transaction():
            for deed in deeds:
                self._write(deed)

    def load(self) -> Order:
        """The order as the journal has it, at one moment."""
        with self._refusing(), self._transaction():
            ask = self._base.execute
            entries = {row[0]: _entry(row) for row in ask(f"SELECT {_ENTRY} FROM entry ORDER BY number")}
            rows = ask(f"SELECT {_SENT} FROM sent ORDER BY rowid")  # the newest last: REPLACE gives a new one
            sent = {row[0]: Sent(Fingerprint(*row[1:4]), row[4]) for row in rows}
            problems = {
                row[0]: Problem(row[4], row[5], Fingerprint(*row[1:4]))
                for row in ask(f"SELECT {_PROBLEM} FROM problem")
            }
            last = ask("SELECT value FROM fact WHERE key = 'last'").fetchone()
        _check_rows(self._path, entries, sent, problems)
        number = decode(str(last[0]), str(self._path)) if last else 0
        if type(number) is not int:
            refuse(str(self._path), "the last number", "an integer", number)
        return Order(entries, sent, problems, max([number, *entries]))

    def _write(self, deed: Deed) -> None:
        value = deed.value
        if value is None:
            key = "number" if deed.table == "entry" else "name"
            self._base.execute(f"DELETE FROM {deed.table} WHERE {key} = ?", (deed.key,))
        elif isinstance(value, Entry):
            self._base.execute("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _row(value))
            # A number is never used twice, as kept versions bear it.
            self._base.execute("INSERT OR REPLACE INTO fact VALUES ('last', ?)", (str(value.number),))
        elif isinstance(value, Sent):
            row = (deed.key, *_looks(value.fingerprint), value.digest)
            self._base.execute("INSERT OR REPLACE INTO sent VALUES (?, ?, ?, ?, ?)", row)
        else:
            row = (deed.key, *_looks(value.fingerprint), value.kind, value.why)
            self._base.execute("INSERT OR REPLACE INTO problem VALUES (?, ?, ?, ?, ?, ?)", row)

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
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if any(word in str(error).lower() for word in ("decode", "malformed", "no such column")):
                raise Corrupt(f"{self._path} is damaged: {error}. Move it away and mount again.") from error
            if "no such table" in str(error):
                raise NotFound(f"{self._path} is empty: its directory was never mounted.") from error
            raise RetryLater(f"The journal {self._path} could not be used: {error}.") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError) as error:
            raise Corrupt(f"{self._path} is damaged: {error}. Move it away and mount again.") from error


def _check_rows(path: Path, *tables: Mapping[Any, Entry | Sent | Problem]) -> None:
    """Check the types of what a journal holds: SQLite keeps any value in any column.

    Raises:
        Corrupt: a value is of another type.
    """
    for key, row in (pair for table in tables for pair in table.items()):
        what = f"{path}: {shown(key)}"
        if type(key) is not (int if isinstance(row, Entry) else str):
            refuse(str(path), "a key", "of another type", key)
        read_dataclass(type(row), dataclasses.asdict(row), what)


def _looks(fingerprint: Fingerprint) -> tuple[int, int, int]:
    return fingerprint.num_bytes, fingerprint.changed_ns, fingerprint.inode


def _row(entry: Entry) -> tuple[object, ...]:
    version = entry.version
    kept = (version.form, *_looks(version.fingerprint), version.digest) if version else (None,) * 5
    return (entry.number, entry.name, entry.source, *kept)


def _entry(row: tuple[Any, ...]) -> Entry:
    number, name, source, form, num_bytes, changed_ns, inode, digest = row
    if form is None:
        return Entry(number, name, None, source)
    return Entry(number, name, Version(form, Fingerprint(num_bytes, changed_ns, inode), digest), source)
