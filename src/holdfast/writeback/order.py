"""The order in which changes of a directory go to the bucket: the order in which they happened; pure.

Every change is an entry. Entries are done one after the other, so that what the bucket shows is at any moment
the directory as it has been, or as it would have been. Each transition answers with the deeds that make it
durable, so that an order that is rebuilt from the journal is the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from holdfast.writeback.files import UNSETTLED, Fingerprint

COPY, HOLD, PATH = "copy", "hold", "path"
"""How a version is kept until it is sent: as a copy; by a second name of its file; only by its name."""
WITHHELD, REFUSED, PASSED_OVER = "withheld", "refused", "passed over"
"""Why a file is not in the bucket: it is torn; no object can be so; it was open, or gone, for too long."""


@dataclass(frozen=True, slots=True)
class Version:
    """A file as it was when it was closed. `digest` - of its bytes, "" if not yet known."""

    form: str
    fingerprint: Fingerprint
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: a version that is to be put, or None for a removal.

    `source` - a name that had the same bytes when this entry was made, so that the bucket can copy them.
    """

    number: int
    name: str
    version: Version | None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """What the bucket holds under a name, as far as we put or fetched it."""

    fingerprint: Fingerprint
    digest: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the file that looks so is not in the bucket."""

    kind: str
    why: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Deed:
    """A row of the journal that is to be written, or removed where its value is None."""

    table: str
    key: int | str
    value: Entry | Sent | Problem | None


Deeds: TypeAlias = "list[Deed]"


@dataclass(slots=True)
class Order:
    """All that is to be done, in order, and all that has been done.

    Args:
        entries: what is to be done.
        sent: by name.
        problems: by name.
        last: number of the newest entry ever made.
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    sent: dict[str, Sent] = field(default_factory=dict)
    problems: dict[str, Problem] = field(default_factory=dict)
    last: int = 0
    begun: int = 0  # number of the entry at work, which nothing may take back
    _newest_of: dict[str, int] = field(default_factory=dict, init=False)  # number of its newest entry by name

    def __post_init__(self) -> None:
        self._newest_of = {entry.name: number for number, entry in self.entries.items()}
        self.begun = next(iter(self.entries), 0)  # the bucket may have it: who loads this knows no better

    def next_number(self) -> int:
        """The number that the next entry will have."""
        return self.last + 1

    def first(self) -> Entry | None:
        """What is to be done now."""
        return next(iter(self.entries.values()), None)

    def put(self, name: str, version: Version, *, source: str = "") -> Deeds:
        """A version was closed, after everything that is in the order."""
        return [*self._forgive(name), self._add(name, version, source)]

    def remove(self, name: str) -> Deeds:
        """A name is gone. Only what the bucket has, or will have, is to be removed there."""
        forgiven = self._forgive(name)
        newest = self._newest(name)
        is_there = newest.version is not None if newest else name in self.sent
        return [*forgiven, self._add(name, None, "")] if is_there else forgiven

    def withdraw(self, name: str) -> tuple[Entry | None, Deeds]:
        """Take back the put of a name that was renamed, if nothing was closed between.

        What was closed between might speak of the old name, so then it stays; and it stays if the bucket
        has, or will have, an older version of that name, which the new name would overtake.
        """
        newest = next(reversed(self.entries.values()), None)
        if newest is None or newest.name != name or newest.number == self.begun or newest.version is None:
            return None, []
        if name in self.sent or sum(entry.name == name for entry in self.entries.values()) > 1:
            return None, []
        return newest, self._drop(newest.number)

    def begin(self, entry: Entry) -> None:
        """An entry is being worked on."""
        self.begun = entry.number

    def sent_now(self, entry: Entry, sent: Sent) -> Deeds:
        """The bucket has it."""
        noted = self.entries[entry.number].version
        if noted and sent.fingerprint.changed_ns == UNSETTLED:
            sent = Sent(noted.fingerprint, sent.digest)  # it may have been settled meanwhile
        self.sent.pop(entry.name, None)  # so that the newest stands last
        self.sent[entry.name] = sent
        return [Deed("sent", entry.name, sent), *self._drop(entry.number)]

    def settle(self, name: str, version: Version) -> Deeds | None:
        """A second look at a file that was looked at too soon; None if it is another version by now."""
        newest, sent = self._newest(name), self.sent.get(name)
        if newest and newest.version and newest.version.digest == version.digest:
            settled = replace(newest, version=replace(newest.version, fingerprint=version.fingerprint))
            self.entries[newest.number] = settled
            return [Deed("entry", newest.number, settled)]
        if newest is None and sent and sent.digest == version.digest:
            return self.fetched(name, Sent(version.fingerprint, version.digest))
        return None

    def removed_now(self, entry: Entry) -> Deeds:
        """The bucket has it no more."""
        self.sent.pop(entry.name, None)
        return [Deed("sent", entry.name, None), *self._drop(entry.number)]

    def passed(self, entry: Entry, kind: str, why: str) -> Deeds:
        """It will not be in the bucket; the reason stays until the file changes."""
        assert entry.version is not None
        deeds = self._drop(entry.number)
        if self._newest(entry.name):  # a newer version is on its way, which is what people ask for
            return deeds
        return [*deeds, *self.object_to(entry.name, Problem(kind, why, entry.version.fingerprint))]

    def object_to(self, name: str, problem: Problem) -> Deeds:
        """A file that cannot be in the bucket."""
        self.problems[name] = problem
        return [Deed("problem", name, problem)]

    def fetched(self, name: str, sent: Sent) -> Deeds:
        """The directory got what the bucket has."""
        self.sent[name] = sent
        return [Deed("sent", name, sent)]

    def forget(self) -> None:
        """Begin anew: nothing is to be done, nothing known to be done. Numbers go on."""
        self.entries.clear()
        self.sent.clear()
        self.problems.clear()
        self._newest_of.clear()

    def demote(self, entry: Entry) -> Deeds:
        """What kept the entry's version is gone: it is known by its name only."""
        assert entry.version is not None
        demoted = replace(entry, version=replace(entry.version, form=PATH))
        self.entries[entry.number] = demoted
        return [Deed("entry", entry.number, demoted)]

    def known(self, name: str) -> Fingerprint | None:
        """How the newest version that is in the order, or done, looked; None if the name is gone or new."""
        if newest := self._newest(name):
            return newest.version.fingerprint if newest.version else None
        if problem := self.problems.get(name):
            return problem.fingerprint
        sent = self.sent.get(name)
        return sent.fingerprint if sent else None

    def names(self) -> set[str]:
        """Every name that the bucket has or will have, and every one with a problem."""
        present = set(self.sent)
        for entry in self.entries.values():
            (present.add if entry.version else present.discard)(entry.name)
        return present | set(self.problems)

    def newest_first(self) -> list[str]:
        """The names, what came last first: whoever deletes so deletes markers before what they speak of."""
        dated = [*self.problems, *self.sent, *(entry.name for entry in self.entries.values())]
        present = self.names()
        return [name for name in dict.fromkeys(reversed(dated)) if name in present]

    def has_pending(self, name: str) -> bool:
        """Whether a change of the name is still to be done."""
        return self._newest(name) is not None

    def _newest(self, name: str) -> Entry | None:
        number = self._newest_of.get(name)
        return None if number is None else self.entries[number]

    def _add(self, name: str, version: Version | None, source: str) -> Deed:
        self.last += 1
        entry = self.entries[self.last] = Entry(self.last, name, version, source)
        self._newest_of[name] = entry.number
        return Deed("entry", entry.number, entry)

    def _drop(self, number: int) -> Deeds:
        name = self.entries.pop(number).name
        if self._newest_of[name] == number:  # so it was the only one: entries are done oldest first
            del self._newest_of[name]
        return [Deed("entry", number, None)]

    def _forgive(self, name: str) -> Deeds:
        return [Deed("problem", name, None)] if self.problems.pop(name, None) else []
