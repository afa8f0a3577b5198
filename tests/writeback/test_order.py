"""The order of changes, apart from files and buckets: what the bucket shows is never ahead of itself."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.writeback.files import Fingerprint
from holdfast.writeback.order import COPY, PATH, WITHHELD, Deeds, Entry, Order, Problem, Sent, Version

NAMES = st.sampled_from(["data", "more", "marker", "last"])


def version(number: int) -> Version:
    """A version that no other one equals."""
    return Version(COPY, Fingerprint(number, number, number), f"digest-{number}")


class Life(RuleBasedStateMachine):
    """Files are closed, deleted and renamed; entries are done one at a time, and the uploader is killed.

    The bucket must at every moment be the directory as it was after some prefix of its changes, and the
    order that a killed uploader's successor reads from the journal must be the one that was lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order = Order()
        self.journal: dict[str, dict] = {"entry": {}, "sent": {}, "problem": {}}
        self.clock = 0
        self.directory: dict[str, int] = {}
        self.past: list[dict[str, int]] = [{}]
        self.at = 0  # the bucket is the directory as in `past[at]`
        self.bucket: dict[str, int] = {}
        self.begun: Entry | None = None

    def write(self, deeds: Deeds) -> None:
        """As the journal does."""
        for deed in deeds:
            if deed.value is None:
                self.journal[deed.table].pop(deed.key, None)
            else:
                self.journal[deed.table][deed.key] = deed.value

    def happened(self) -> None:
        self.past.append(dict(self.directory))

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.clock += 1
        self.directory[name] = self.clock
        self.write(self.order.put(name, version(self.clock)))
        self.happened()

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if self.directory.pop(name, None) is not None:
            self.happened()
        self.write(self.order.remove(name))

    @rule(old=NAMES, new=NAMES)
    def rename(self, old: str, new: str) -> None:
        if old == new or old not in self.directory:
            return
        value = self.directory[old]
        withdrawn, deeds = self.order.withdraw(old)
        self.write(deeds)
        if withdrawn is not None and withdrawn.name == old:
            self.past.pop()  # it is as if it had been closed under its new name
        self.directory[new] = value
        self.write(self.order.put(new, version(value), source=old))
        if withdrawn is None or old in self.order.names():
            self.happened()
        del self.directory[old]
        self.write(self.order.remove(old))
        self.happened()

    @precondition(lambda self: self.begun is None and self.order.first() is not None)
    @rule()
    def begin(self) -> None:
        self.begun = self.order.first()
        assert self.begun is not None
        self.order.begin(self.begun)

    @precondition(lambda self: self.begun is not None)
    @rule()
    def finish(self) -> None:
        entry, self.begun = self.begun, None
        assert entry is not None
        if entry.version is None:
            self.bucket.pop(entry.name, None)
            self.write(self.order.removed_now(entry))
        else:
            self.bucket[entry.name] = entry.version.fingerprint.num_bytes
            self.write(self.order.sent_now(entry, Sent(entry.version.fingerprint, entry.version.digest)))

    @rule(is_done=st.booleans())
    def kill(self, is_done: bool) -> None:
        """The entry at work may have reached the bucket, and the journal does not know."""
        if self.begun is not None and is_done:
            if self.begun.version is None:
                self.bucket.pop(self.begun.name, None)
            else:
                self.bucket[self.begun.name] = self.begun.version.fingerprint.num_bytes
        self.begun = None
        entries = dict(sorted(self.journal["entry"].items()))
        lost, self.order = (
            self.order,
            Order(entries, dict(self.journal["sent"]), dict(self.journal["problem"]), self.order.last),
        )
        assert list(lost.entries.items()) == list(self.order.entries.items())
        assert (lost.sent, lost.problems) == (self.order.sent, self.order.problems)

    @invariant()
    def bucket_is_the_directory_of_some_moment(self) -> None:
        moments = [at for at in range(len(self.past)) if self.past[at] == self.bucket]
        assert moments, (self.bucket, self.past)
        later = [at for at in moments if at >= self.at]
        assert later, f"the bucket went back: {self.bucket}"
        self.at = later[0]

    @invariant()
    def nothing_is_forgotten(self) -> None:
        for name, value in self.directory.items():
            known = self.order.known(name)
            assert known is not None
            assert known.num_bytes == value
        assert self.order.names() == set(self.directory)

    def teardown(self) -> None:
        while self.order.first() is not None:
            if self.begun is None:
                self.begin()
            self.finish()
            self.bucket_is_the_directory_of_some_moment()
        assert self.bucket == self.directory


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_removal_of_what_never_was_in_the_bucket_is_nothing():
    assert Order().remove("unknown") == []


def test_a_put_that_was_begun_is_not_withdrawn():
    order = Order()
    order.put("tmp", version(1))
    entry = order.first()
    assert entry is not None
    order.begin(entry)
    assert order.withdraw("tmp") == (None, [])


def test_a_put_behind_which_something_was_closed_is_not_withdrawn():
    """The marker may speak of the name that was renamed since."""
    order = Order()
    order.put("data", version(1))
    order.put("marker", version(2))
    assert order.withdraw("data") == (None, [])


def test_a_problem_lasts_until_the_file_changes():
    order = Order()
    order.put("torn.pt", version(1))
    entry = order.first()
    assert entry is not None
    order.passed(entry, WITHHELD, "torn")
    assert order.known("torn.pt") == version(1).fingerprint
    assert order.problems == {"torn.pt": Problem(WITHHELD, "torn", version(1).fingerprint)}
    order.put("torn.pt", version(2))
    assert order.problems == {}


def test_a_problem_of_an_older_version_says_nothing_about_a_newer_one():
    order = Order()
    order.put("file", version(1))
    entry = order.first()
    order.put("file", version(2))
    assert entry is not None
    order.passed(entry, WITHHELD, "torn")
    assert order.problems == {}
    assert order.known("file") == version(2).fingerprint


def test_a_version_whose_kept_bytes_are_lost_keeps_its_place():
    order = Order()
    order.put("a", version(1))
    order.put("b", version(2))
    entry = order.first()
    assert entry is not None
    order.demote(entry)
    first = order.first()
    assert first is not None
    assert first.version is not None
    assert (first.name, first.version.form) == ("a", PATH)
    assert [one.name for one in order.entries.values()] == ["a", "b"]
