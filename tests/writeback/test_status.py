"""`drain --status` never says that all is in the bucket when it is not."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import RetryLater
from holdfast.writeback import wait_until_settled
from writeback.desk import Desk, wait_for

LARGE = 5 << 20


@contextmanager
def stopped(desk: Desk) -> Iterator[None]:
    """The uploader stands still: it reads no events."""
    pid = desk.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def names(found: tuple) -> set[str]:
    return {one.name for one in found}


def test_changes_that_the_uploader_has_not_read_count(desk: Desk):
    desk.write("file", "one")
    desk.write("removed", "x")
    desk.drained()
    with stopped(desk):
        desk.write("file", "two")
        desk.write("new", os.urandom(LARGE))
        (desk.directory / "removed").unlink()
        status = desk.status()
        assert not status.is_drained
        assert names(status.unread) == {"file", "new", "removed"}
        with pytest.raises(RetryLater, match="3 just changed"):
            wait_until_settled(desk.directory, timeout_s=0.05)
    assert desk.drained() == desk.local()


def test_a_rewrite_of_the_same_length_counts(desk: Desk):
    """Twice within one tick of the file system's clock, many times: size and time alone would not tell."""
    for number in range(30):
        desk.write("marker", f"{number:04}a")
        desk.write("marker", f"{number:04}b")
        assert desk.drained() == {"marker": f"{number:04}b".encode()}


def test_files_that_are_open_count_even_when_nothing_was_written(desk: Desk):
    path = desk.write("file", "x" * 5000)
    desk.drained()
    with path.open("r+b"):
        assert names(desk.status().written) == {"file"}
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        file.close()
        mapped[0:3] = b"new"
        assert names(desk.status().written) == {"file"}
    with path.open("rb"):
        assert desk.drained() == {"file": b"new" + b"x" * 4997}


def test_a_dead_uploader_is_told_as_dead(desk: Desk):
    desk.write("sent", "x")
    desk.drained()
    desk.kill()
    status = desk.status()
    assert (status.uploader, status.pid, status.is_drained) == ("dead", None, True)
    desk.write("not sent", "x")
    status = wait_until_settled(desk.directory, timeout_s=60)  # comes back at once: nobody is at work
    assert status.uploader == "dead"
    assert not status.is_drained
    assert names(status.unread) == {"not sent"}
    desk.mount()
    assert desk.drained() == desk.local()


def test_lost_events_are_found_by_looking(desk: Desk):
    """More happens than the kernel's queue holds; what comes after is not told, and is sent all the same."""
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"the kernel's queue holds {limit} events: too many to fill it here")
    desk.write("doomed", "x")
    desk.drained()
    with stopped(desk):
        for name in ("a", "b") * (limit // 2 + 10):
            os.close(os.open(desk.directory / name, os.O_WRONLY | os.O_CREAT))
        desk.write("a", "written when nobody was told any more")
        desk.write("after/the/overflow", "x")
        desk.write("large", os.urandom(LARGE))
        (desk.directory / "doomed").unlink()
    assert desk.drained() == desk.local()
    assert "events were lost" in desk.log()
    desk.write("after/the/later", "y")
    assert desk.drained() == desk.local()


def test_a_false_all_done_is_never_said_while_a_program_writes(desk: Desk):
    """Whenever the status says drained, the bucket has what was closed before the question."""
    num_drained = 0
    for number in range(60):
        data = os.urandom(LARGE if number % 10 == 0 else 100)
        desk.write(f"file-{number % 7}", data)
        if desk.status().is_drained:
            assert desk.store.get(f"file-{number % 7}") == data
            num_drained += 1
    wait_for(lambda: desk.status().is_drained, "the end")
    assert desk.bucket() == desk.local()


def test_the_status_is_for_programs_too(desk: Desk, desks: Callable[..., Desk]):
    import json

    desk.write("file", "x")
    desk.drained()
    facts = json.loads(json.dumps(desk.status().as_json()))
    assert facts["is_drained"] is True
    assert facts["uploader"] == "alive"
    assert facts["num_sent"] == 1
    assert desk.status().say() == f"all of {desk.directory} is in {desk.place} (1 file)"
