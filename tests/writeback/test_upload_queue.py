"""The upload queue without files and buckets: the bucket never shows a later change before an earlier one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from holdfast.errors import Corrupt
from holdfast.jobs.writeback.files import Fingerprint
from holdfast.jobs.writeback.journal import FILE, FOLDER, JournaledQueue
from holdfast.jobs.writeback.upload_queue import (
    COPY,
    HARD_LINK,
    INCOMPLETE,
    PATH,
    Sent,
    Upload,
    UploadProblem,
    UploadQueue,
    Version,
)

NAMES = st.sampled_from(["data", "marker", "part-1", "part-2", "part-30"])
SIDE_BY_SIDE = 3


def version(number: int) -> Version:
    """Return a version that differs from all others."""
    return Version(COPY, Fingerprint(number, number, number), f"digest-{number}")


class QueueMachine(RuleBasedStateMachine):
    """Files are closed, deleted and renamed. Entries are done side by side, and the uploader is killed.

    The bucket must at every moment be the directory as it was after some prefix of its changes, perhaps with
    some new parts of the series that follows. The queue that a killed uploader's successor reads from the
    journal must be the one that was lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = UploadQueue()
        self.journal: dict[str, dict] = {"entry": {}, "sent": {}, "problem": {}}
        self.clock = 0
        self.directory: dict[str, int] = {}
        self.past: list[dict[str, int]] = [{}]
        self.at = 0  # the bucket is the directory as in `past[at]`
        self.bucket: dict[str, int] = {}
        self.begun: list[Upload] = []

    def happened(self) -> None:
        self.past.append(dict(self.directory))

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.clock += 1
        self.directory[name] = self.clock
        self.queue.put(name, version(self.clock))
        self.happened()

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if self.directory.pop(name, None) is not None:
            self.happened()
        self.queue.remove(name)

    @rule(old=NAMES, new=NAMES)
    def rename(self, old: str, new: str) -> None:
        if old == new or old not in self.directory:
            return
        value = self.directory[old]
        withdrawn = self.queue.withdraw(old)
        if withdrawn is not None and withdrawn.name == old:
            self.past.pop()  # as if the file had been closed under its new name
        self.directory[new] = value
        self.queue.put(new, version(value), source=old)
        if withdrawn is None or old in self.queue.newest_first():
            self.happened()
        del self.directory[old]
        self.queue.remove(old)
        self.happened()

    @rule()
    def begin(self) -> None:
        if (entry := self.queue.begin(SIDE_BY_SIDE)) is not None:
            assert entry not in self.begun
            self.begun.append(entry)
        assert len(self.begun) <= SIDE_BY_SIDE

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entry = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        self.arrive(entry)
        if entry.version is None:
            self.queue.mark_removed(entry)
        else:
            self.queue.mark_sent(entry, Sent(entry.version.fingerprint, entry.version.digest))

    def arrive(self, entry: Upload) -> None:
        if entry.version is None:
            self.bucket.pop(entry.name, None)
        else:
            self.bucket[entry.name] = entry.version.fingerprint.num_bytes

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """Entries that are begun may have reached the bucket without a record in the journal."""
        for entry in self.begun:
            if data.draw(st.booleans()):
                self.arrive(entry)
        self.begun = []
        for table, key, value in self.queue.writes:  # as the journal does
            if value is None:
                self.journal[table].pop(key, None)
            else:
                self.journal[table][key] = value
        entries, sent, problems = (dict(self.journal[table]) for table in ("entry", "sent", "problem"))
        entries, lost = dict(sorted(entries.items())), self.queue
        self.queue = UploadQueue(entries, sent, problems, lost.last)
        assert list(lost.entries.items()) == list(self.queue.entries.items())
        assert (lost.sent, lost.problems) == (self.queue.sent, self.queue.problems)
        assert lost.newest_first() == self.queue.newest_first()

    @invariant()
    def bucket_is_the_directory_of_some_moment(self) -> None:
        moments = [at for at in range(len(self.past)) if self.may_be(at)]
        assert moments, (self.bucket, self.past)
        later = [at for at in moments if at >= self.at]
        assert later, f"the bucket went back: {self.bucket}"
        self.at = later[0]

    def may_be(self, at: int) -> bool:
        """Return True if the bucket is the directory of a moment, with new parts that were closed next."""
        known = dict(self.past[at])
        if any(self.bucket.get(name) != value for name, value in known.items()):
            return False
        for after in self.past[at + 1 :]:
            new = after.keys() - known.keys()
            if len(new) != 1 or known.items() - after.items() or not min(new).startswith("part-"):
                break
            known = after
        return self.bucket.items() <= known.items()

    @invariant()
    def nothing_is_forgotten(self) -> None:
        for name, value in self.directory.items():
            known = self.queue.fingerprint(name)
            assert known is not None
            assert known.num_bytes == value
        assert sorted(self.queue.newest_first()) == sorted(self.directory)

    def teardown(self) -> None:
        while (entry := self.queue.first()) is not None:
            self.arrive(entry)
            if entry.version is None:
                self.queue.mark_removed(entry)
            else:
                self.queue.mark_sent(entry, Sent(entry.version.fingerprint, entry.version.digest))
            self.bucket_is_the_directory_of_some_moment()
        assert self.bucket == self.directory


TestLife = QueueMachine.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)


def send_all(queue: UploadQueue) -> None:
    """Send all entries."""
    while (entry := queue.first()) is not None:
        assert entry.version is not None
        queue.mark_sent(entry, Sent(entry.version.fingerprint, entry.version.digest))


def sent_queue() -> UploadQueue:
    """Return a queue whose three files are sent."""
    queue = UploadQueue()
    for number, name in enumerate(("data", "latest", "marker")):
        queue.put(name, version(number))
    send_all(queue)
    return queue


@pytest.mark.parametrize("is_pending", [False, True])
def test_a_file_written_again_with_the_same_bytes_keeps_its_place(is_pending: bool):
    """A job that repeats its last step writes the data beside the marker of the first time.

    The digest of a large file is not known before it is sent, so that of a pending one its size decides.
    """
    queue = sent_queue()
    again = Fingerprint(version(0).fingerprint.num_bytes, 7, 7)
    queue.put("data", Version(HARD_LINK, again) if is_pending else replace(version(0), fingerprint=again))
    queue.put("latest", version(8))
    if not is_pending:
        send_all(queue)
    assert queue.newest_first() == ["latest", "marker", "data"]


def test_the_journal_keeps_the_order_of_files_that_are_confirmed_later(tmp_path: Path):
    """The time of a file read too soon is written again, perhaps after its marker was sent."""
    (tmp_path / FOLDER).mkdir()
    journal, queue = JournaledQueue(tmp_path), sent_queue()
    assert queue.confirm("data", replace(version(0), fingerprint=version(7).fingerprint))
    queue.put("latest", version(8))
    send_all(queue)
    journal.do(lambda order: order.writes.extend(queue.writes))
    loaded = journal.load()
    journal.close()
    assert queue.newest_first() == ["latest", "marker", "data"]
    assert loaded.newest_first() == queue.newest_first()
    assert loaded.sent == queue.sent


def test_a_value_of_another_type_in_the_journal_is_damage(tmp_path: Path):
    (tmp_path / FOLDER).mkdir()
    queue = JournaledQueue(tmp_path)
    queue.do(lambda order: order.put("data", version(1)))
    with closing(sqlite3.connect(tmp_path / FOLDER / FILE)) as base, base:
        base.execute("UPDATE entry SET value = json_set(value, '$.version.digest', 0)")
    with pytest.raises(Corrupt, match=r"Expected `str`, got `int` - at `\$\.version\.digest`"):
        queue.load()
    with closing(sqlite3.connect(tmp_path / FOLDER / FILE)) as base, base:
        base.execute("UPDATE entry SET value = x'00'")
    with pytest.raises(Corrupt, match="Expected `str`, got `bytes`"):
        queue.load()
    queue.close()


def test_an_upload_in_progress_is_not_withdrawn():
    queue = UploadQueue()
    queue.put("tmp", version(1))
    assert queue.begin(1) is not None
    assert queue.withdraw("tmp") is None


def test_removing_a_name_that_was_never_in_the_bucket_does_nothing():
    queue = UploadQueue()
    queue.remove("unknown")
    assert queue.writes == []


def test_a_problem_lasts_until_the_file_changes():
    queue = UploadQueue()
    queue.put("torn.pt", version(1))
    (entry,) = queue.entries.values()
    queue.skip(entry, INCOMPLETE, "torn")
    assert queue.fingerprint("torn.pt") == version(1).fingerprint
    assert queue.problems == {"torn.pt": UploadProblem(INCOMPLETE, "torn", version(1).fingerprint)}
    for number in (2, 3):
        queue.put("torn.pt", version(number))
    assert queue.problems == {}
    queue.skip(next(iter(queue.entries.values())), INCOMPLETE, "torn")
    assert queue.problems == {}, "the older version does not matter"
    assert queue.fingerprint("torn.pt") == version(3).fingerprint


def test_an_entry_whose_kept_version_is_lost_keeps_its_place():
    queue = UploadQueue()
    queue.put("a", version(1))
    queue.put("b", version(2))
    queue.mark_lost(next(iter(queue.entries.values())))
    first, second = queue.entries.values()
    assert first.version is not None
    assert (first.name, first.version.form, second.name) == ("a", PATH, "b")


@pytest.mark.parametrize(
    ("names", "num_begun"),
    [
        (["shard-0", "shard-1", "shard-2", "COMMITTED"], 3),
        (["shard-0", "shard-1.meta", "shard-2"], 1),
        (["step-1/shard-0", "step-1/shard-1", "step-2/shard-0"], 2),
        (["shard-0", "shard-1", "shard-0"], 2),
        (["old-7", "shard-0", "shard-1"], 1),
        (["shard-0", "old-7", "shard-1"], 1),
        (["shard-0", "old-8", "old-7"], 1),
        (["latest", "shard-0"], 1),
    ],
)
def test_only_new_files_whose_names_differ_in_numbers_are_uploaded_side_by_side(
    names: list[str], num_begun: int
):
    queue = UploadQueue(sent={"old-7": Sent(version(0).fingerprint, "")})
    for number, name in enumerate(names, 1):
        queue.put(name, version(number))
    begun = iter(lambda: queue.begin(8), None)
    assert [entry.name for entry in begun if entry] == names[:num_begun]


def test_large_files_and_removals_are_done_one_after_the_other():
    queue = UploadQueue()
    for number in range(2):
        queue.put(f"large-{number}", Version(HARD_LINK, Fingerprint(number, 0, 0)))
    send_first = queue.begin(8)
    assert send_first is not None
    assert queue.begin(8) is None
    send_all(queue)
    for number in range(2):
        queue.remove(f"large-{number}")
    assert queue.begin(8) is not None
    assert queue.begin(8) is None
