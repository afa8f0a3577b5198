"""Files of a write-back directory, with real uploaders and a folder as the bucket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import Conflict, InvalidInput, NotFound, RetryLater
from holdfast.jobs.writeback import mount, status_of
from writeback.harness import MountedDirectory, wait_for

MakeDirectory = Callable[..., MountedDirectory]
LARGE = 5 << 20  # larger than files that are copied when closed


def test_files_arrive_and_the_uploader_exits_when_no_handle_is_left(mounted: MountedDirectory):
    mounted.write("small", "one")
    mounted.write("a/b/c/deep", "two")
    mounted.write("large", os.urandom(LARGE))
    (mounted.directory / "empty").touch()
    (mounted.directory / "link").hardlink_to(mounted.directory / "small")  # nothing closes a new hard link
    status = mounted.held.pop().close(timeout_s=None)
    assert (status.uploader, status.is_drained) == ("ended", True)
    assert mounted.bucket() == mounted.local()
    assert set(mounted.bucket()) == {"small", "a/b/c/deep", "large", "empty", "link"}


def test_changes_are_uploaded(mounted: MountedDirectory):
    """Files are rewritten, appended to, replaced and deleted: the bucket ends up like the directory."""
    for name in ("rewritten", "appended", "replaced", "deleted", "gone/with/its/folder"):
        mounted.write(name, os.urandom(1000))
    large = mounted.write("large", os.urandom(LARGE))
    mounted.drained()
    mounted.write("rewritten", "new")
    with (mounted.directory / "appended").open("ab") as file:
        file.write(b"more")
    mounted.write("fresh", "fresh").replace(mounted.directory / "replaced")
    (mounted.directory / "deleted").unlink()
    (mounted.directory / "gone/with/its/folder").unlink()
    (mounted.directory / "gone/with/its").rmdir()
    with large.open("r+b") as file:
        file.write(b"in place")
    found = mounted.drained()
    assert found == mounted.local()
    assert found["replaced"] == b"fresh"
    assert "fresh" not in found


def test_directories_may_be_renamed_moved_in_and_moved_out(mounted: MountedDirectory, tmp_path: Path):
    """As programs do that first write a checkpoint under another name."""
    for number in range(3):
        mounted.write(f"building-5/shard-{number}", os.urandom(100))
    mounted.drained()
    (mounted.directory / "building-5").rename(mounted.directory / "step-5")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("from outside")
    (tmp_path / "outside").rename(mounted.directory / "inside")
    mounted.drained()
    mounted.write("step-5/late", "written after the rename")
    assert set(mounted.drained()) == {*(f"step-5/shard-{n}" for n in range(3)), "step-5/late", "inside/file"}
    (mounted.directory / "step-5").rename(tmp_path / "left")
    (tmp_path / "left" / "shard-9").write_text("none of ours any more")
    assert set(mounted.drained()) == {"inside/file"}


def test_a_renamed_file_is_copied_by_the_bucket(mounted: MountedDirectory):
    """The bucket already has its bytes: the folder's file is the same one under both names."""
    path = mounted.write("before", os.urandom(LARGE))
    mounted.drained()
    inode = (Path(mounted.place) / "before").stat().st_ino
    path.rename(mounted.directory / "after")
    assert set(mounted.drained()) == {"after"}
    assert (Path(mounted.place) / "after").stat().st_ino == inode


def test_unfinished_names_stay_until_they_are_renamed(mounted: MountedDirectory):
    mounted.write("model.pt.tmp", "half of it")
    mounted.write("other", "x")
    assert set(mounted.drained()) == {"other"}
    (mounted.directory / "model.pt.tmp").rename(mounted.directory / "model.bin")
    assert set(mounted.drained()) == {"other", "model.bin"}


def test_a_file_that_cannot_be_an_object_is_reported_and_does_not_block(mounted: MountedDirectory):
    """Symbolic links, pipes, and names that are not text."""
    mounted.write("file", "x")
    (mounted.directory / "link").symlink_to("file")
    os.mkfifo(mounted.directory / "pipe")
    bad = os.path.join(os.fsencode(mounted.directory), b"bad\xff")  # noqa: PTH118 - bytes
    Path(os.fsdecode(bad)).write_text("x")
    mounted.write("later", "y")
    status = mounted.drain()
    assert (status.is_drained, status.is_settled) == (False, True)
    assert {one.name for one in status.left_out} == {"link", "pipe", "bad\\xff"}
    assert set(mounted.bucket()) == {"file", "later"}
    for name in ("link", "pipe", os.fsdecode(b"bad\xff")):
        (mounted.directory / name).unlink()
    assert set(mounted.drained()) == {"file", "later"}


def test_an_incomplete_archive_is_held_back_until_it_is_complete(mounted: MountedDirectory):
    """The kernel closes a killed writer's file too, but zip archives, as torch writes, show it."""
    path = mounted.directory / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", os.urandom(100_000))
    whole = path.read_bytes()
    mounted.drained()
    mounted.write("model.pt", whole[:-10])
    mounted.write("marker", "step 2")
    status = mounted.drain()
    assert [one.name for one in status.left_out] == ["model.pt"]
    assert "directory at its end is missing" in status.left_out[0].why
    assert mounted.bucket() == {"model.pt": whole, "marker": b"step 2"}
    mounted.write("model.pt", whole)
    assert mounted.drained() == mounted.local()


def test_the_first_mount_downloads_what_the_bucket_holds_and_uploads_the_other_files(
    make_directory: MakeDirectory,
):
    mounted = make_directory()
    mounted.write("early", "bird")
    mounted.store.put("a", b"small")
    mounted.store.put("b/c", os.urandom(20 << 20))
    mounted.mount()
    assert mounted.drained() == mounted.local() == mounted.bucket()
    assert set(mounted.local()) == {"early", "a", "b/c"}


def test_fetching_is_optional(make_directory: MakeDirectory):
    """Objects that were not downloaded stay in the bucket and do not count as deleted."""
    mounted = make_directory()
    mounted.store.put("a", b"small")
    mounted.mount(fetch=False)
    mounted.write("b", "new")
    assert mounted.drained() == {"a": b"small", "b": b"new"}
    assert set(mounted.local()) == {"b"}


def test_nothing_is_deleted_while_the_last_version_of_an_open_file_is_not_in_the_bucket(
    mounted: MountedDirectory,
):
    """`latest` is closed and open again for the next step, while the one in the bucket names the old data."""
    mounted.write("data-1", "1")
    latest = mounted.write("latest", "data-1")
    mounted.drained()
    mounted.write("data-2", "2")
    with latest.open("r+b", buffering=0) as file:
        latest.write_bytes(b"data-2")  # closed, which the uploader handles while the file is open
        (mounted.directory / "data-1").unlink()
        mounted.write("later", "x")
        wait_for(lambda: "later" in mounted.bucket(), "what was closed after the deletion")
        assert mounted.bucket() == {"data-1": b"1", "latest": b"data-1", "data-2": b"2", "later": b"x"}
        file.write(b"data-2")
    assert mounted.drained() == {"latest": b"data-2", "data-2": b"2", "later": b"x"}


def test_an_object_replaces_an_unknown_file_of_its_name(make_directory: MakeDirectory):
    """The file may be older. It is set aside, not lost."""
    mounted = make_directory()
    mounted.store.put("model", b"from the bucket")
    mounted.write("model", b"of unknown age")
    mounted.mount()
    assert mounted.local() == {"model": b"from the bucket"}
    (aside,) = (mounted.directory / ".holdfast-writeback" / "set-aside").rglob("model")
    assert aside.read_bytes() == b"of unknown age"


def test_two_objects_that_no_directory_can_hold_are_reported(make_directory: MakeDirectory):
    mounted = make_directory()
    mounted.store.put("a/b", b"x")
    mounted.write("a", "a file has the name of the object's folder")
    with pytest.raises(RetryLater, match="no file system can hold both"):
        mounted.mount()


def test_mounting_again_uploads_what_changed_in_between(make_directory: MakeDirectory):
    """Files are changed, created and deleted while no uploader is running."""
    mounted = make_directory()
    mounted.mount()
    for name in ("changed", "deleted", "same"):
        mounted.write(name, name)
    mounted.drained()
    mounted.held.pop().close(timeout_s=None)
    mounted.write("changed", "after")
    mounted.write("new", os.urandom(LARGE))
    (mounted.directory / "deleted").unlink()
    assert {one.name for one in mounted.status().unread} == {"changed", "new", "deleted"}
    mounted.mount()
    assert mounted.drained() == mounted.local()
    assert set(mounted.bucket()) == {"changed", "new", "same"}


def test_a_directory_of_an_older_attempt_receives_the_newer_files(make_directory: MakeDirectory):
    """Its own unsent changes are older: they are set aside, and do not overwrite the bucket's files."""
    first, second = make_directory("first"), make_directory("second")
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
    with pytest.raises(Conflict, match=r"by attempt 2 of job-7\. This is attempt 1"):
        first.mount(owner="job-7", attempt=1)
    first.mount(owner="job-7", attempt=3)
    assert first.local() == second.local() == first.drained()
    kept = {path.read_text() for path in first.directory.rglob(".holdfast-writeback/set-aside/*/*")}
    assert kept == {"step 2, never sent", "never sent either"}


def test_a_shared_directory_of_an_older_attempt_receives_what_others_have_uploaded(
    make_directory: MakeDirectory,
):
    """Two directories of the same attempts write one file of the same size: the bucket has the last."""
    first, second = make_directory("first"), make_directory("second")
    first.mount(owner="job-7", attempt=1, is_shared=True)
    second.mount(owner="job-7", attempt=1, is_shared=True)
    first.write("state", "a" * 2_000_000)
    first.drained()
    second.write("state", "b" * 2_000_000)
    second.drained()
    for one in (first, second):
        one.held.pop().close(timeout_s=None)
        one.mount(owner="job-7", attempt=2, is_shared=True)
    assert first.local()["state"] == first.bucket()["state"] == b"b" * 2_000_000


@pytest.mark.slow
def test_an_uploader_of_an_older_attempt_stops_uploading(make_directory: MakeDirectory):
    """The uploader checks every few seconds for a newer attempt."""
    first, second = make_directory("first"), make_directory("second")
    first.mount(owner="job-7", attempt=1)
    second.mount(owner="job-7", attempt=2)
    number = iter(range(1_000_000))

    def is_fenced() -> bool:
        first.write(f"late-{next(number)}", "x")
        return first.status().uploader == "fenced"

    wait_for(is_fenced, "the first uploader to notice the second")
    first.wait_until_gone()
    status = first.status()
    assert not status.is_drained
    assert "by attempt 2 of job-7" in status.trouble
    assert second.status().uploader == "alive"


@pytest.mark.parametrize("owners", [("job-7", "job-7"), ("job-7", "job-8"), ("", "")])
def test_mounts_of_the_same_attempt_or_other_owners_coexist(
    make_directory: MakeDirectory, owners: tuple[str, str]
):
    """As the nodes of a job, and jobs that share a bucket. Unsent files are sent at the next mount."""
    first, second = make_directory("first"), make_directory("second")
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


def test_a_process_that_inherits_the_handle_keeps_the_uploader_alive(mounted: MountedDirectory):
    """The job continues after the mounting process exits, and its later files are uploaded."""
    held = mounted.held.pop()
    code = "import sys; sys.stdin.read(); open(sys.argv[1], 'w').write('late')"
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(mounted.directory / "late")],
        stdin=subprocess.PIPE,
        pass_fds=(held.fileno(),),
    )
    status = held.close(timeout_s=1.0)
    assert status.uploader == "alive"
    job.communicate()
    mounted.wait_until_gone()
    assert mounted.bucket() == {"late": b"late"}


def test_mounting_twice_joins_the_uploader_of_the_same_place(make_directory: MakeDirectory, tmp_path: Path):
    mounted = make_directory()
    first = mounted.mount()
    pid = mounted.pid()
    mounted.mount()
    assert mounted.pid() == pid
    first.close()
    mounted.write("file", "x")
    mounted.drained()
    assert mounted.pid() == pid
    with pytest.raises(Conflict, match="already mounted"):
        mount(mounted.directory, tmp_path / "elsewhere")


def test_after_sigterm_closed_files_are_uploaded_and_the_uploader_exits(mounted: MountedDirectory):
    """As before the end of a machine: an open file is not waited for, and reported as missing."""
    with (mounted.directory / "open").open("w") as file:
        mounted.write("closed", "x")
        file.write("half")
        file.flush()
        mounted.signal(signal.SIGTERM)
        mounted.wait_until_gone()
        assert [one.name for one in mounted.status().written] == ["open"]
    assert mounted.bucket() == {"closed": b"x"}
    assert mounted.status().uploader == "ended"


def test_the_deletion_of_the_directory_is_reported(mounted: MountedDirectory):
    mounted.write("file", "x")
    mounted.drained()
    shutil.rmtree(mounted.directory)
    wait_for(lambda: not mounted.directory.exists(), "the directory's end")
    with pytest.raises(NotFound):
        mounted.status()
    assert mounted.bucket() in ({"file": b"x"}, {})
    mounted.held.clear()


def test_invalid_mounts_are_rejected(tmp_path: Path):
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


def test_mount_reports_an_unreachable_place(make_directory: MakeDirectory, tmp_path: Path):
    (tmp_path / "bucket").mkdir()
    mounted = make_directory(place=str(tmp_path / "bucket" / "inner"))
    (tmp_path / "bucket" / "inner").write_text("a file")
    with pytest.raises(InvalidInput, match="is a file"):
        mounted.mount()
