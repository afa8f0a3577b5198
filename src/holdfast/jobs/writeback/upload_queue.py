"""Upload queue: the changes of a directory in their order; pure.

Every change is an entry, and entries are uploaded one after the other. So the bucket always shows a state
that the directory had, or would have had. Only a series of small new files is uploaded side by side. Each
transition also adds the journal writes that make it durable, so that a queue loaded from the journal is the
same queue.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from holdfast.jobs.writeback.files import UNSETTLED, Fingerprint

COPY, HARD_LINK, PATH = "copy", "hold", "path"
"""Forms in which a version is kept: as a copy, by a second name of its file, or only by its own name."""
INCOMPLETE, REJECTED, SKIPPED = "incomplete", "rejected", "skipped"
"""Reasons why a file is not uploaded: incomplete, impossible as an object, open or missing for too long."""


class Version(Struct, frozen=True):
    """File as it was when it was closed. `digest` is empty until it is computed."""

    form: str
    fingerprint: Fingerprint
    digest: str = ""


class Upload(Struct, frozen=True):
    """Change to upload."""

    number: int
    name: str
    version: Version | None  # None: a removal
    source: str = ""  # name that had the same bytes when this was added, so that the bucket can copy them


class Sent(Struct, frozen=True):
    """State of an object in the bucket, as last uploaded or downloaded."""

    fingerprint: Fingerprint
    digest: str


class UploadProblem(Struct, frozen=True):
    """Reason why the file with this fingerprint is not in the bucket."""

    kind: str
    why: str
    fingerprint: Fingerprint


JournalWrite: TypeAlias = tuple[str, int | str, Upload | Sent | UploadProblem | None]
"""Table, key and value of a row of the journal to write. None: it is deleted."""


class UploadQueue(Struct):
    """Queued uploads in order, and the results of completed ones."""

    entries: dict[int, Upload] = {}
    sent: dict[str, Sent] = {}
    problems: dict[str, UploadProblem] = {}
    last: int = 0
    begun: set[int] = set()  # numbers of the entries being uploaded
    last_begun: int = 0  # entries up to this number may have been begun, and cannot be withdrawn
    writes: list[JournalWrite] = []  # changes the journal does not have
    _newest_of: dict[str, int] = {}  # number of the newest entry by name

    def __post_init__(self) -> None:
        self._newest_of = {entry.name: number for number, entry in self.entries.items()}
        self.last_begun = next(reversed(self.entries), 0)  # by an uploader that was killed

    def first(self) -> Upload | None:
        """Return the oldest entry, or None."""
        return next(iter(self.entries.values()), None)

    def begin(self, limit: int) -> Upload | None:
        """Return the oldest entry that may be uploaded now and is not yet, marked as begun, or None.

        The first entry may, and the rest of its series. A series are small files of one folder, right behind
        each other, that the bucket does not have, and whose names differ only in their numbers, such as
        shards. Any other entry waits until all before it are done.
        """
        names: set[str] = set()
        series = None
        for entry in islice(self.entries.values(), limit):
            found = self._series(entry)
            if names and (found is None or found != series or entry.name in names):
                return None
            if entry.number not in self.begun:
                self.begun.add(entry.number)
                self.last_begun = max(self.last_begun, entry.number)
                return entry
            names.add(entry.name)
            series = found
        return None

    def _series(self, entry: Upload) -> tuple[str, str] | None:
        """Return the folder and the name without numbers, or None if the order of an entry matters."""
        version = entry.version
        if version is None or version.form != COPY or not version.digest or entry.name in self.sent:
            return None
        folder, _, last = entry.name.rpartition("/")
        return folder, re.sub(r"[0-9]+", "0", last)

    def put(self, name: str, version: Version | None, *, source: str = "") -> None:
        """Add the upload of a version that was just closed, or the removal of the name."""
        self._clear_problem(name)
        self.last += 1
        self._set("entry", self.last, Upload(self.last, name, version, source))
        self._newest_of[name] = self.last

    def remove(self, name: str) -> None:
        """Add the removal of a name, if the bucket has it or will have it."""
        newest = self._newest(name)
        if newest.version is not None if newest else name in self.sent:
            self.put(name, None)
        else:
            self._clear_problem(name)

    def withdraw(self, name: str) -> Upload | None:
        """Withdraw the upload of a renamed file, if it is the newest entry.

        A file closed later may refer to the old name, which must then be uploaded first. The upload also
        stays if the bucket has, or will have, an older version of the name, which the new name would
        overtake.
        """
        newest = next(reversed(self.entries.values()), None)
        if newest is None or newest.name != name or newest.version is None:
            return None
        if newest.number <= self.last_begun:
            return None
        if name in self.sent or sum(entry.name == name for entry in self.entries.values()) > 1:
            return None
        self._drop(newest)
        return newest

    def mark_sent(self, entry: Upload, sent: Sent) -> None:
        """Record that an entry was uploaded."""
        noted = self.entries[entry.number].version
        if noted and sent.fingerprint.changed_ns == UNSETTLED:
            sent = Sent(noted.fingerprint, sent.digest)  # the entry may have been confirmed meanwhile
        before = self.sent.get(entry.name)
        if before is not None and before.digest != sent.digest:  # so that the newest bytes are last
            self._set("sent", entry.name, None)
        self._set("sent", entry.name, sent)
        self._drop(entry)

    def confirm(self, name: str, version: Version) -> bool:
        """Confirm that a file read too soon has not changed since. Return False if it has."""
        newest, sent = self._newest(name), self.sent.get(name)
        if newest and newest.version and newest.version.digest == version.digest:
            settled = replace(newest.version, fingerprint=version.fingerprint)
            self._set("entry", newest.number, replace(newest, version=settled))
            return True
        if newest is None and sent and sent.digest == version.digest:
            self.mark_downloaded(name, Sent(version.fingerprint, version.digest))
            return True
        return False

    def mark_removed(self, entry: Upload) -> None:
        """Record that an entry's name was removed from the bucket."""
        self._set("sent", entry.name, None)
        self._drop(entry)

    def skip(self, entry: Upload, kind: str, why: str) -> None:
        """Remove an entry that cannot be uploaded. The problem stays until the file changes."""
        assert entry.version is not None
        self._drop(entry)
        if not self._newest(entry.name):  # otherwise a newer version is queued, and only that one matters
            self.add_problem(entry.name, UploadProblem(kind, why, entry.version.fingerprint))

    def add_problem(self, name: str, problem: UploadProblem) -> None:
        """Record a file that cannot be uploaded."""
        self._set("problem", name, problem)

    def mark_downloaded(self, name: str, sent: Sent) -> None:
        """Record that an object was downloaded into the directory."""
        self._set("sent", name, sent)

    def clear(self) -> None:
        """Remove all entries and results, as another mount has continued. The numbering continues."""
        for table in ("entry", "problem", "sent"):
            for key in list(self._rows(table)):
                self._set(table, key, None)
        self._newest_of.clear()

    def mark_lost(self, entry: Upload) -> None:
        """Mark the kept version of an entry as lost: only the file's name remains."""
        assert entry.version is not None
        self._set("entry", entry.number, replace(entry, version=replace(entry.version, form=PATH)))

    def fingerprint(self, name: str) -> Fingerprint | None:
        """Return the fingerprint of the newest queued or uploaded version, or None."""
        if newest := self._newest(name):
            return newest.version.fingerprint if newest.version else None
        if problem := self.problems.get(name):
            return problem.fingerprint
        sent = self.sent.get(name)
        return sent.fingerprint if sent else None

    def newest_first(self) -> list[str]:
        """Return all names that the bucket has or will have, or that have a problem, the newest bytes first.

        So markers are deleted before their data.

        A file that was written again with the same bytes keeps its place: a job that was killed repeats its
        last step, and writes the data again beside the marker of the first time. Of a pending version without
        a digest only the size is compared.
        """
        dated: dict[str, tuple[str, int] | None] = dict.fromkeys(self.problems)
        for name, sent in self.sent.items():
            _date(dated, name, sent.digest, sent.fingerprint.num_bytes)
        for entry in self.entries.values():
            if entry.version is not None:
                _date(dated, entry.name, entry.version.digest, entry.version.fingerprint.num_bytes)
            elif entry.name not in self.problems:
                dated.pop(entry.name, None)
        return list(reversed(dated))

    def has_pending(self, name: str) -> bool:
        """Return True if a change of this name is queued."""
        return self._newest(name) is not None

    def _newest(self, name: str) -> Upload | None:
        number = self._newest_of.get(name)
        return None if number is None else self.entries[number]

    def _rows(self, table: str) -> dict[Any, Any]:
        return {"entry": self.entries, "sent": self.sent, "problem": self.problems}[table]

    def _set(self, table: str, key: int | str, value: Upload | Sent | UploadProblem | None) -> None:
        """Set a value here and in the journal, or delete it."""
        if value is None:
            self._rows(table).pop(key, None)
        else:
            self._rows(table)[key] = value
        self.writes.append((table, key, value))

    def _drop(self, entry: Upload) -> None:
        self._set("entry", entry.number, None)
        self.begun.discard(entry.number)
        if self._newest_of[entry.name] == entry.number:  # the oldest entry of a name is done first
            del self._newest_of[entry.name]

    def _clear_problem(self, name: str) -> None:
        if name in self.problems:
            self._set("problem", name, None)


def _date(dated: dict[str, tuple[str, int] | None], name: str, digest: str, num_bytes: int) -> None:
    """Move a name to the end, unless its earlier version has the same bytes."""
    before = dated.get(name)
    if before is None or before[1] != num_bytes or (digest and before[0] and digest != before[0]):
        dated.pop(name, None)
    dated[name] = digest, num_bytes
