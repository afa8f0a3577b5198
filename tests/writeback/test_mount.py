"""What a write-back directory does with files: real uploaders, a folder as the bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import Conflict, InvalidInput, NotFound, RetryLater
from holdfast.writeback import mount, status_of
from writeback.desk import Desk, wait_for

MakeDesk = Callable[..., Desk]
LARGE = 5 << 20  # above what is copied when it is closed


# -- what arrives ----------------------------------------------------------------------------------------


def test_files_arrive_small_large_and_empty(desk: Desk):
    desk.write("small", "one")
    desk.write("a/b/c/deep", "two")
    desk.write("large", os.urandom(LARGE))
    (desk.directory / "empty").touch()
    assert desk.drained() == desk.local()
    assert set(desk.bucket()) == {"small", "a/b/c/deep", "large", "empty"}


def test_changes_are_followed(desk: Desk):
    """Rewritten, appended, renamed over, deleted: the bucket ends as the directory does."""
    for name in ("rewritten", "appended", "replaced", "deleted", "gone/with/its/folder"):
        desk.write(name, os.urandom(1000))
    large = desk.write("large", os.urandom(LARGE))
    desk.drained()
    desk.write("rewritten", "new")
    with (desk.directory / "appended").open("ab") as file:
        file.write(b"more")
    desk.write("fresh", "fresh").replace(desk.directory / "replaced")
    (desk.directory / "deleted").unlink()
    (desk.directory / "gone/with/its/folder").unlink()
    (desk.directory / "gone/with/its").rmdir()
    with large.open("r+b") as file:
        file.write(b"in place")
    found = desk.drained()
    assert found == desk.local()
    assert found["replaced"] == b"fresh"
    assert "fresh" not in found


def test_directories_may_be_renamed_moved_in_and_moved_out(desk: Desk, tmp_path: Path):
    """As programs do that write a checkpoint under another name first."""
    for number in range(3):
        desk.write(f"building-5/shard-{number}", os.urandom(100))
    desk.drained()
    (desk.directory / "building-5").rename(desk.directory / "step-5")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("from outside")
    (tmp_path / "outside").rename(desk.directory / "inside")
    desk.drained()
    desk.write("step-5/late", "written after the rename")
    assert set(desk.drained()) == {*(f"step-5/shard-{n}" for n in range(3)), "step-5/late", "inside/file"}
    (desk.directory / "step-5").rename(tmp_path / "left")
    (tmp_path / "left" / "shard-9").write_text("none of ours any more")
    assert set(desk.drained()) == {"inside/file"}


def test_a_second_name_of_a_file_arrives(desk: Desk):
    """Nobody closes a hard link, and it must arrive all the same."""
    desk.write("one", "bytes")
    (desk.directory / "two").hardlink_to(desk.directory / "one")
    assert desk.drained() == {"one": b"bytes", "two": b"bytes"}


def test_a_renamed_file_is_copied_by_the_bucket(desk: Desk):
    """Its bytes are there already: the bucket's file is the same one under both names."""
    path = desk.write("before", os.urandom(LARGE))
    desk.drained()
    inode = (Path(desk.place) / "before").stat().st_ino
    path.rename(desk.directory / "after")
    assert set(desk.drained()) == {"after"}
    assert (Path(desk.place) / "after").stat().st_ino == inode


def test_unfinished_names_stay_until_they_are_renamed(desk: Desk):
    desk.write("model.pt.tmp", "half of it")
    desk.write("other", "x")
    assert set(desk.drained()) == {"other"}
    (desk.directory / "model.pt.tmp").rename(desk.directory / "model.bin")
    assert set(desk.drained()) == {"other", "model.bin"}


def test_what_no_object_can_be_is_told_and_holds_up_nothing(desk: Desk):
    """Links, pipes, and names that are no text."""
    desk.write("file", "x")
    (desk.directory / "link").symlink_to("file")
    os.mkfifo(desk.directory / "pipe")
    bad = os.path.join(os.fsencode(desk.directory), b"bad\xff")  # noqa: PTH118 - bytes
    Path(os.fsdecode(bad)).write_text("x")
    desk.write("later", "y")
    status = desk.drain()
    assert not status.is_drained
    assert status.is_settled
    assert {one.name for one in status.left_out} == {"link", "pipe", "bad\\xff"}
    assert set(desk.bucket()) == {"file", "later"}
    for name in ("link", "pipe", os.fsdecode(b"bad\xff")):
        (desk.directory / name).unlink()
    assert set(desk.drained()) == {"file", "later"}


def test_a_torn_archive_is_withheld_until_it_is_whole(desk: Desk):
    """A killed writer closes its file, too; zip archives, as torch writes, tell that they are torn."""
    path = desk.directory / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", os.urandom(100_000))
    whole = path.read_bytes()
    desk.drained()
    desk.write("model.pt", whole[:-10])
    desk.write("marker", "step 2")
    status = desk.drain()
    assert [one.name for one in status.left_out] == ["model.pt"]
    assert "directory at its end is missing" in status.left_out[0].why
    assert desk.bucket() == {"model.pt": whole, "marker": b"step 2"}
    desk.write("model.pt", whole)
    assert desk.drained() == desk.local()


# -- what is there already -------------------------------------------------------------------------------


def test_what_the_bucket_holds_is_there_after_mounting(desks: MakeDesk):
    desk = desks()
    desk.store.put("a", b"small")
    desk.store.put("b/c", os.urandom(20 << 20))
    desk.mount()
    assert desk.local() == desk.bucket()
    assert desk.drained() == desk.local()


def test_nothing_need_be_fetched(desks: MakeDesk):
    """What is not fetched stays in the bucket, and is not taken for deleted."""
    desk = desks()
    desk.store.put("a", b"small")
    desk.mount(fetch=False)
    desk.write("b", "new")
    assert desk.drained() == {"a": b"small", "b": b"new"}
    assert set(desk.local()) == {"b"}


def test_files_that_were_there_before_the_first_mount_are_sent(desks: MakeDesk):
    desk = desks()
    desk.write("early", "bird")
    desk.mount()
    assert desk.drained() == {"early": b"bird"}


def test_an_unknown_file_gives_way_to_the_object_of_its_name(desks: MakeDesk):
    """It may be older; it is set aside, not lost."""
    desk = desks()
    desk.store.put("model", b"from the bucket")
    desk.write("model", b"of unknown age")
    desk.mount()
    assert desk.local() == {"model": b"from the bucket"}
    (aside,) = (desk.directory / ".holdfast-writeback" / "set-aside").rglob("model")
    assert aside.read_bytes() == b"of unknown age"


def test_two_objects_that_no_directory_can_hold_are_told(desks: MakeDesk):
    desk = desks()
    desk.store.put("a/b", b"x")
    desk.write("a", "a file has the name of the object's folder")
    with pytest.raises(RetryLater, match="no directory can hold both"):
        desk.mount()


def test_mounting_again_after_nobody_watched_sends_what_changed(desks: MakeDesk):
    """Changed, new and deleted while no uploader was there."""
    desk = desks()
    desk.mount()
    for name in ("changed", "deleted", "same"):
        desk.write(name, name)
    desk.drained()
    desk.held.pop().close(timeout_s=None)
    desk.write("changed", "after")
    desk.write("new", os.urandom(LARGE))
    (desk.directory / "deleted").unlink()
    assert {one.name for one in desk.status().unread} == {"changed", "new", "deleted"}
    desk.mount()
    assert desk.drained() == desk.local()
    assert set(desk.bucket()) == {"changed", "new", "same"}


def test_a_directory_that_a_newer_attempt_has_overtaken_takes_the_newer_files(desks: MakeDesk):
    """Its own unsent changes are older: they are set aside, and do not overwrite the bucket's."""
    first, second = desks("first"), desks("second")
    first.mount(owner="job-7", attempt=1)
    first.write("last", "step 1")
    first.write("same-size", "a" * 2_000_000)
    first.drained()
    first.kill()
    first.write("last", "step 2, never sent")
    first.write("extra", "never sent either")
    second.mount(owner="job-7", attempt=2)
    second.write("last", "step 7")
    second.write("same-size", "b" * 2_000_000)
    second.drained()
    second.held.pop().close(timeout_s=None)
    with pytest.raises(Conflict, match="by attempt 2 of job-7, and this is attempt 1"):
        first.mount(owner="job-7", attempt=1)
    first.mount(owner="job-7", attempt=3)
    assert first.local() == second.local() == first.drained()
    kept = {path.read_text() for path in first.directory.rglob(".holdfast-writeback/set-aside/*/*")}
    assert kept == {"step 2, never sent", "never sent either"}


@pytest.mark.slow
def test_an_uploader_that_was_overtaken_sends_no_more(desks: MakeDesk):
    """It looks every few seconds whether a newer attempt has come."""
    first, second = desks("first"), desks("second")
    first.mount(owner="job-7", attempt=1)
    second.mount(owner="job-7", attempt=2)
    number = iter(range(1_000_000))

    def is_fenced() -> bool:
        first.write(f"late-{next(number)}", "x")
        return first.status().uploader == "fenced"

    wait_for(is_fenced, "the first uploader to see the second")
    first.wait_until_gone()
    status = first.status()
    assert not status.is_drained
    assert "by attempt 2 of job-7" in status.trouble
    assert second.status().uploader == "alive"


@pytest.mark.parametrize("owners", [("job-7", "job-7"), ("job-7", "job-8"), ("", "")])
def test_mounts_of_one_attempt_or_of_others_write_beside_each_other(desks: MakeDesk, owners: tuple[str, str]):
    """As the nodes of a job do, and jobs that share a bucket. What was not sent is sent at the next mount."""
    first, second = desks("first"), desks("second")
    options = [{"owner": owner, "attempt": 1} if owner else {} for owner in owners]
    first.mount(**options[0])
    second.mount(**options[1])
    first.write("rank-0", "0")
    second.write("rank-1", "1")
    first.drained()
    first.kill()
    first.write("rank-0", "00")
    first.mount(**options[0])
    first.drained()
    assert second.drained() == {"rank-0": b"00", "rank-1": b"1"}
    assert not list(first.directory.rglob(".holdfast-writeback/set-aside/*/*"))


# -- the uploader's life ---------------------------------------------------------------------------------


def test_the_uploader_ends_when_all_is_sent_and_nobody_holds_it(desk: Desk):
    desk.write("file", os.urandom(LARGE))
    status = desk.held.pop().close(timeout_s=None)
    assert status.uploader == "ended"
    assert status.is_drained
    assert desk.bucket() == desk.local()


def test_a_process_that_inherits_the_hold_keeps_the_uploader(desk: Desk):
    """The job goes on when who mounted is gone, and what it writes then is sent."""
    held = desk.held.pop()
    code = "import sys; sys.stdin.read(); open(sys.argv[1], 'w').write('late')"
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(desk.directory / "late")],
        stdin=subprocess.PIPE,
        pass_fds=(held.fileno(),),
    )
    status = held.close(timeout_s=1.0)
    assert status.uploader == "alive"
    job.communicate()
    desk.wait_until_gone()
    assert desk.bucket() == {"late": b"late"}


def test_mounting_twice_joins(desks: MakeDesk):
    desk = desks()
    first = desk.mount()
    pid = desk.pid()
    desk.mount()
    assert desk.pid() == pid
    first.close()
    desk.write("file", "x")
    desk.drained()
    assert desk.pid() == pid


def test_a_directory_goes_to_one_place(desk: Desk, tmp_path: Path):
    with pytest.raises(Conflict, match="mounted already"):
        mount(desk.directory, tmp_path / "elsewhere")


def test_sigterm_sends_what_is_closed_and_ends(desk: Desk):
    """As when the machine goes: what is still open is not waited for, and is told as missing."""
    with (desk.directory / "open").open("w") as file:
        desk.write("closed", "x")
        file.write("half")
        file.flush()
        desk.signal(signal.SIGTERM)
        desk.wait_until_gone()
        status = desk.status()
        assert [one.name for one in status.written] == ["open"]
    assert desk.bucket() == {"closed": b"x"}
    assert desk.status().uploader == "ended"


def test_a_directory_that_is_deleted_is_told(desk: Desk):
    import shutil

    desk.write("file", "x")
    desk.drained()
    shutil.rmtree(desk.directory)
    wait_for(lambda: not desk.directory.exists(), "the directory's end")
    with pytest.raises(NotFound):
        desk.status()
    assert desk.bucket() in ({"file": b"x"}, {})
    desk.held.clear()


def test_what_cannot_be_mounted_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="is a file"):
        mount(tmp_path / "file", tmp_path / "bucket")
    for place in ("ftp://somewhere/else", "memory://here", tmp_path, tmp_path / "directory" / "inside"):
        with pytest.raises(InvalidInput):
            mount(tmp_path / "directory", place)
    for owner, attempt in (("job/7", 1), ("job-7", 0), ("", 1)):
        with pytest.raises(InvalidInput, match="owner"):
            mount(tmp_path / "directory", tmp_path / "bucket", owner=owner, attempt=attempt)
    with pytest.raises(NotFound, match="is not a write-back directory"):
        status_of(tmp_path)


def test_a_place_that_cannot_be_reached_is_told_by_mount(desks: MakeDesk, tmp_path: Path):
    (tmp_path / "bucket").mkdir()
    desk = desks(place=str(tmp_path / "bucket" / "inner"))
    (tmp_path / "bucket" / "inner").write_text("a file")
    with pytest.raises(InvalidInput, match="is a file"):
        desk.mount()
