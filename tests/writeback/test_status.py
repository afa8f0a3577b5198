"""`drain --status` never claims that everything is in the bucket when it is not."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import RetryLater
from holdfast.jobs.writeback import wait_until_settled
from writeback.harness import MountedDirectory, wait_for

LARGE = 5 << 20


@contextmanager
def stopped(mounted: MountedDirectory) -> Iterator[None]:
    """Stop the uploader, so that it reads no events."""
    pid = mounted.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def names(found: tuple) -> set[str]:
    return {one.name for one in found}


def test_changes_that_the_uploader_has_not_recorded_count(mounted: MountedDirectory):
    mounted.write("file", "one")
    mounted.write("removed", "x")
    mounted.drained()
    with stopped(mounted):
        mounted.write("file", "two")
        mounted.write("new", os.urandom(LARGE))
        (mounted.directory / "removed").unlink()
        status = mounted.status()
        assert not status.is_drained
        assert names(status.unread) == {"file", "new", "removed"}
        with pytest.raises(RetryLater, match="3 just changed"):
            wait_until_settled(mounted.directory, timeout_s=0.05)
    assert mounted.drained() == mounted.local()


def test_a_rewrite_of_the_same_length_counts(mounted: MountedDirectory):
    """Repeated twice within one tick of the file system's clock: size and time alone would not show it."""
    for number in range(30):
        mounted.write("marker", f"{number:04}a")
        mounted.write("marker", f"{number:04}b")
        assert mounted.drained() == {"marker": f"{number:04}b".encode()}


def test_open_files_count_even_if_nothing_was_written(mounted: MountedDirectory):
    path = mounted.write("file", "x" * 5000)
    mounted.drained()
    with path.open("r+b"):
        assert names(mounted.status().written) == {"file"}
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        file.close()
        mapped[0:3] = b"new"
        assert names(mounted.status().written) == {"file"}
    with path.open("rb"):
        assert mounted.drained() == {"file": b"new" + b"x" * 4997}


def test_a_dead_uploader_is_reported_as_dead(mounted: MountedDirectory):
    mounted.write("sent", "x")
    mounted.drained()
    mounted.kill()
    status = mounted.status()
    assert (status.uploader, status.pid, status.is_drained) == ("dead", None, True)
    mounted.write("not sent", "x")
    status = wait_until_settled(mounted.directory, timeout_s=60)  # returns at once: no uploader is running
    assert (status.uploader, status.is_drained) == ("dead", False)
    assert names(status.unread) == {"not sent"}
    mounted.mount()
    assert mounted.drained() == mounted.local()


def test_files_of_lost_events_are_found_by_scanning(mounted: MountedDirectory):
    """More happens than the kernel's queue holds. Later changes have no event, but are uploaded too."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"the kernel's queue holds {limit} events: too many to fill it here")
    mounted.write("doomed", "x")
    mounted.drained()
    with stopped(mounted):
        for name in ("a", "b") * (limit // 2 + 10):
            os.close(os.open(mounted.directory / name, os.O_WRONLY | os.O_CREAT))
        mounted.write("a", "written after the queue was full")
        mounted.write("after/the/overflow", "x")
        mounted.write("large", os.urandom(LARGE))
        (mounted.directory / "doomed").unlink()
    assert mounted.drained() == mounted.local()
    assert "events were lost" in mounted.log()
    mounted.write("after/the/later", "y")
    assert mounted.drained() == mounted.local()


def test_the_status_is_never_drained_too_early_while_a_program_writes(mounted: MountedDirectory):
    """When the status is drained, the bucket has all that was closed before the call."""
    num_drained = 0
    for number in range(60):
        data = os.urandom(LARGE if number % 10 == 0 else 100)
        mounted.write(f"file-{number % 7}", data)
        if mounted.status().is_drained:
            assert mounted.store.get(f"file-{number % 7}") == data
            num_drained += 1
    wait_for(lambda: mounted.status().is_drained, "the end")
    assert mounted.bucket() == mounted.local()
