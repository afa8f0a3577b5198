"""Order of arrival in the bucket: an S3 server behind a proxy that delays and breaks uploads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from fault_proxy import FaultProxy
from servers import Server
from writeback.harness import MountedDirectory, wait_for

LARGE = 12 << 20  # sent in parts


def test_a_marker_waits_for_data_that_was_closed_earlier(remote: MountedDirectory, proxy: FaultProxy):
    """While the first shard's last part is delayed, no file that was closed later may appear."""
    gate = proxy.hold(method="PUT", target=r"shard-0.*partNumber=2")
    remote.write("shard-0", os.urandom(LARGE))
    remote.write("shard-1", os.urandom(LARGE))
    remote.write("COMMITTED", "1")
    assert gate.reached.wait(600)
    wait_for(lambda: len(remote.status().waiting) == 3, "all three to be queued")
    assert remote.bucket() == {}
    gate.opened.set()
    assert remote.drained() == remote.local()


def test_objects_appear_in_the_order_of_closing(remote: MountedDirectory, proxy: FaultProxy):
    """Observed in the bucket continuously, while uploads are slow."""
    proxy.bytes_per_s = 4e6
    names = []
    for number in range(4):
        for kind, num_bytes in (("large", 600_000), ("small", 10), ("empty", 0)):
            names.append(remote.write(f"{kind}-{number}", os.urandom(num_bytes)).name)
    seen = []

    def all_there() -> bool:
        found = remote.bucket()
        assert set(found) == set(names[: len(found)]), f"{sorted(found)} is no beginning of {names}"
        seen.append(len(found))
        return len(found) == len(names)

    wait_for(all_there, "every object")
    assert len(set(seen)) > 3, "the bucket was not listed often enough to show an order"


def test_small_shards_are_uploaded_side_by_side_and_their_marker_waits_for_all(
    s3: Server, proxy: FaultProxy, make_directory: Callable[..., MountedDirectory]
):
    """The first shard has no answer, the second fails at first. The others arrive, no marker does."""
    remote = make_directory(place=s3.home("side-by-side", port=proxy.port, timeout="30", parallel="8"))
    gate = proxy.hold(method="PUT", target="shard-00")
    proxy.inject("503", method="PUT", target="shard-01", times=3)
    remote.mount()
    names = [remote.write(f"shard-{number:02}", str(number)).name for number in range(20)]
    remote.write("COMMITTED", "1")
    assert gate.reached.wait(600)
    wait_for(lambda: set(remote.bucket()) >= set(names[1:]), "the other shards", remote.describe)
    wait_for(lambda: [one.name for one in remote.status().waiting] == ["shard-00", "COMMITTED"], "the rest")
    assert "COMMITTED" not in remote.bucket()
    assert not remote.status().is_settled
    gate.opened.set()
    assert remote.drained() == remote.local()


def test_a_failing_shard_is_reported_until_it_arrives(
    s3: Server, proxy: FaultProxy, make_directory: Callable[..., MountedDirectory]
):
    """Although the shards beside it succeed."""
    remote = make_directory(place=s3.home("failing", port=proxy.port, timeout="2", parallel="8"))
    proxy.inject("503", method="PUT", target="shard-1$", times=None)
    remote.mount()
    for number in range(4):
        remote.write(f"shard-{number}", "x")
    wait_for(lambda: "Uploading shard-1 has failed" in remote.status().trouble, "the failure to be reported")
    wait_for(lambda: [one.name for one in remote.status().waiting] == ["shard-1"], "the other shards")
    assert "Uploading shard-1 has failed" in remote.status().trouble
    proxy.clear()
    assert remote.drained() == remote.local()
    assert remote.status().trouble == ""


def test_deletes_and_renames_keep_their_place_in_the_order(remote: MountedDirectory, proxy: FaultProxy):
    """The old checkpoint stays until the new marker exists, and a renamed file always has one name."""
    remote.write("data-1", "old data")
    remote.write("latest", "data-1")
    remote.drained()
    gate = proxy.hold(method="PUT", target="data-2")
    remote.write("data-2", "new data")
    remote.write("latest", "data-2")
    (remote.directory / "data-1").unlink()
    remote.write("notes", "x").rename(remote.directory / "notes-renamed")
    assert gate.reached.wait(600)
    wait_for(lambda: any(one.why == "to be deleted" for one in remote.status().waiting), "the delete")
    # The proxy delays the response, not the object: data-2 may exist, but nothing later.
    assert remote.bucket() == {"data-1": b"old data", "latest": b"data-1", "data-2": b"new data"}
    gate.opened.set()
    assert remote.drained() == {"data-2": b"new data", "latest": b"data-2", "notes-renamed": b"x"}


def test_a_marker_that_is_overwritten_in_place_never_precedes_its_data(
    remote: MountedDirectory, proxy: FaultProxy
):
    """`latest` is rewritten for each step while the first step's data is still being uploaded."""
    gate = proxy.hold(method="PUT", target="data-1")
    for step in range(1, 6):
        remote.write(f"data-{step}", os.urandom(200_000))
        remote.write("latest", str(step))
    assert gate.reached.wait(600)
    names = {"latest", *(f"data-{step}" for step in range(1, 6))}
    wait_for(lambda: {one.name for one in remote.status().waiting} == names, "all files to be queued")
    wait_for(lambda: not remote.status().unread, "all versions to be queued")
    gate.opened.set()

    def is_last() -> bool:
        latest = remote.bucket().get("latest")
        found = remote.bucket()  # read after the marker, so it can only have more
        assert latest is None or f"data-{int(latest)}" in found
        return latest == b"5"

    wait_for(is_last, "the last marker")
    assert remote.drained() == remote.local()


def test_data_that_is_overwritten_before_its_upload_still_precedes_its_marker(
    remote: MountedDirectory, proxy: FaultProxy
):
    """The old bytes are lost and the new ones are not closed yet, so the marker waits."""
    gate = proxy.hold(method="PUT", target="first")
    remote.write("first", "x")
    path = remote.write("weights", os.urandom(LARGE))
    remote.write("marker", "weights are there")
    assert gate.reached.wait(600)
    wait_for(lambda: len(remote.status().waiting) == 3, "the marker to be queued")
    with path.open("r+b", buffering=0) as file:
        file.write(b"new")
        gate.opened.set()
        wait_for(lambda: "first" in remote.bucket(), "the first file")
        wait_for(lambda: "opened for writing again" in remote.status().trouble, "the wait for the open file")
        assert set(remote.bucket()) == {"first"}
        assert [one.name for one in remote.status().written] == ["weights"]
    assert remote.drained() == remote.local()


def test_a_file_that_is_written_during_its_upload_does_not_appear_torn(
    remote: MountedDirectory, proxy: FaultProxy
):
    """The upload in progress must not complete."""
    gate = proxy.hold(method="PUT", target=r"weights.*partNumber=1")
    num_bytes = 40 << 20  # in 8 parts, few of which are read ahead
    path = remote.write("weights", os.urandom(num_bytes))
    assert gate.reached.wait(600)
    new = os.urandom(num_bytes)
    with path.open("r+b", buffering=0) as file:
        file.write(new[: num_bytes // 2])
        gate.opened.set()
        wait_for(lambda: "opened for writing again" in remote.status().trouble, "the change to be noticed")
        assert remote.bucket() == {}
        file.write(new[num_bytes // 2 :])
    assert remote.drained() == {"weights": new}


def test_an_open_file_is_not_uploaded(remote: MountedDirectory):
    """However long it is idle. A mapped file counts as open."""
    with (remote.directory / "open").open("wb", buffering=0) as file:
        file.write(b"half")
        remote.write("closed", "x")
        wait_for(lambda: "closed" in remote.bucket(), "the closed file")
        status = remote.status()
        assert [one.name for one in status.written] == ["open"]
        assert not status.is_settled
        file.write(b" and half")
    assert remote.drained() == {"open": b"half and half", "closed": b"x"}


def test_versions_survive_their_files(remote: MountedDirectory, proxy: FaultProxy):
    """A large file is deleted and another replaced while queued: the closed versions are uploaded."""
    gate = proxy.hold(method="PUT", target="blocks")
    remote.write("blocks", "x")
    doomed = remote.write("doomed", os.urandom(LARGE))
    remote.write("marker-1", hashlib.sha256(doomed.read_bytes()).hexdigest())
    assert gate.reached.wait(600)
    wait_for(lambda: len(remote.status().waiting) == 3, "the versions to be kept")
    held = proxy.hold(method="PUT", target="marker-1")
    doomed.unlink()
    gate.opened.set()
    assert held.reached.wait(600)
    found = remote.bucket()
    assert len(found["doomed"]) == LARGE
    held.opened.set()
    assert remote.drained() == remote.local()
    assert hashlib.sha256(found["doomed"]).hexdigest() == remote.bucket()["marker-1"].decode()


def test_after_failures_of_the_bucket_everything_arrives_in_order(
    remote: MountedDirectory, proxy: FaultProxy
):
    """Errors, broken connections and lost responses are reported while they last."""
    proxy.inject("503", times=None)
    for number in range(3):
        remote.write(f"file-{number}", os.urandom(1000))
    wait_for(lambda: "Uploading file-0 has failed" in remote.status().trouble, "the failure to be reported")
    status = remote.status()
    assert (status.is_settled, status.uploader) == (False, "alive")
    assert remote.bucket() == {}
    proxy.clear()
    for fault in ("reset-before", "reset-after", "reset-request"):
        proxy.inject(fault, method="PUT", times=1)
    assert remote.drained() == remote.local()
    assert remote.status().trouble == ""


def test_the_bucket_holds_no_more_than_the_directory(remote: MountedDirectory, tmp_path: Path):
    """Files are deleted right after they were written, some before any scan."""
    for number in range(50):
        path = remote.write(f"brief-{number}", str(number))
        if number % 2:
            path.unlink()
    assert remote.drained() == remote.local()
