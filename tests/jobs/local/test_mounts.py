"""What jobs write into buckets and read from them: a real S3 server, behind a proxy that holds requests."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path

import pytest

from holdfast.errors import NotFound
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.supply import caches
from holdfast.jobs.status import Status
from holdfast.store import Store, open_store
from holdfast.testing.faultproxy import FaultProxy
from holdfast.testing.servers import Server
from holdfast.writeback import status_of
from holdfast.writeback.ownership import FOLDER
from jobs.desk import Desk

_numbers = itertools.count()
SAVES = """
save() {
  head -c 9000000 /dev/urandom > out/data-$1.tmp
  mv out/data-$1.tmp out/data-$1
  echo $1 > out/marker-$1
}
"""
"""Data in two parts, then the marker that speaks of them."""


class Place:
    """A prefix of the bucket: jobs get to it by the proxy, tests look past it."""

    def __init__(self, s3: Server, proxy: FaultProxy) -> None:
        prefix = f"mounts{next(_numbers)}"
        self.url = s3.home(prefix, port=proxy.port, timeout="2", part_bytes="5MiB", parallel="1")
        self.store: Store = open_store(s3.home(prefix))

    def names(self) -> set[str]:
        return {entry.name for entry in self.store.list() if not entry.name.startswith(FOLDER)}


@pytest.fixture(autouse=True)
def _trusted(s3: Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own word that keys may be sent to the servers that task files name here."""
    monkeypatch.setenv("HOLDFAST_TRUST_ENDPOINTS", f"{s3.endpoint_url},{proxy.url},http://127.0.0.1:9")


@pytest.fixture
def place(s3: Server, proxy: FaultProxy) -> Place:
    return Place(s3, proxy)


def cached(place: Place) -> str:
    return f'file_mounts: {{out: {{source: "{place.url}", mode: MOUNT_CACHED}}}}'


class Watcher:
    """Looks at the bucket again and again: was there ever a marker without its data?"""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._is_over = threading.Event()
        self.num_looks = 0
        self.wrong: list[set[str]] = []
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            # Markers are listed first, so the data can only have come meanwhile.
            marked = {name.removeprefix("marker-") for name in self._place.names() if "marker" in name}
            found = self._place.names()
            if {f"data-{one}" for one in marked} - found:
                self.wrong.append(found)
            self.num_looks += 1

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert self.num_looks > 1
        assert not self.wrong


def uploader(desk: Desk, job: Job) -> processes.Process:
    """The living uploader of the job's first write-back directory."""
    path = caches(desk.files(job))[0].path
    found: list[processes.Process] = []

    def is_there() -> bool:
        pid = status_of(path).pid if Path(path, ".holdfast-writeback").exists() else None
        process = processes.look_up(pid) if pid else None
        found.extend([process] if process else [])
        return bool(found)

    desk.wait_for(job, is_there, "an uploader")
    return found[0]


def test_a_named_bucket_is_written_through_a_write_back_directory(desk: Desk) -> None:
    head = f"file_mounts: {{{desk.folder}/out: {{name: results, mode: MOUNT_CACHED}}}}"
    job = desk.submit(
        f"echo 1 > {desk.folder}/out/a; mkdir {desk.folder}/out/d; echo 2 > {desk.folder}/out/d/b", head=head
    )
    ended = desk.wait(job)
    assert (ended.status, ended.reason) == (Status.SUCCEEDED, ""), desk.tell(job)
    bucket = desk.state / "buckets" / "results"
    assert (bucket / "a").read_text() == "1\n"
    assert (bucket / "d" / "b").read_text() == "2\n"
    assert not (desk.folder / "out").is_symlink()
    again = desk.submit(f"cat {desk.folder}/out/d/b", head=head)
    assert desk.wait(again).status is Status.SUCCEEDED
    assert "2\n" in desk.log(again), "another job sees what the bucket holds"


def test_a_job_is_not_done_before_its_files_are_in_the_bucket(
    desk: Desk, place: Place, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = desk.submit(SAVES + "save 1", head=cached(place))
    with Watcher(place):
        assert gate.reached.wait(60), desk.tell(job)
        waiting = desk.wait(job, Status.WINDING_DOWN)
        assert "waiting" in waiting.reason
        assert not status_of(desk.files(job).workdir(0) / "out").is_drained
        assert place.names() == set()
        gate.opened.set()
        ended = desk.wait(job)
    assert (ended.status, ended.reason, ended.attempt) == (Status.SUCCEEDED, "", 1)
    assert place.names() == {"data-1", "marker-1"}
    assert "all that the job wrote is in its bucket" in desk.log(job)


def test_a_preempted_job_has_its_files_in_the_bucket_before_it_goes_on(desk: Desk, place: Place) -> None:
    job = desk.submit(
        SAVES
        + """
        if [ $HOLDFAST_ATTEMPT = 1 ]; then
          trap 'save 1; exit 75' TERM
          echo ready
          while true; do sleep 0.02; done
        fi
        cat out/marker-1
        until [ -e go ]; do sleep 0.02; done
        save 2
        """,
        head=cached(place),
    )
    with Watcher(place):
        desk.wait_until_said(job, "ready")
        desk.wait(job, Status.RUNNING)
        desk.engine.preempt(job.id, lead_s=100)
        desk.wait_until_said(job, "attempt 2 of job")
        assert place.names() == {"data-1", "marker-1"}
        desk.wait_until_said(job, "\n1\n")
        (desk.files(job).workdir(0) / "go").touch()
        ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1), desk.tell(job)
    assert place.names() == {"data-1", "marker-1", "data-2", "marker-2"}


def test_what_a_lost_node_had_not_sent_is_there_for_the_next_attempt(
    desk: Desk, place: Place, proxy: FaultProxy
) -> None:
    """Node, uploader and all are killed in the middle of an upload."""
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    job = desk.submit(
        SAVES
        + """
        if [ $HOLDFAST_ATTEMPT = 1 ]; then save 1; echo saved; sleep 1000; fi
        cat out/marker-1
        save 2
        """,
        head=cached(place),
    )
    with Watcher(place):
        desk.wait_until_said(job, "saved")
        assert gate.reached.wait(60)
        processes.end([uploader(desk, job)])
        desk.kill_node(job, 0)
        gate.opened.set()
        ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1), desk.tell(job)
    assert "\n1\n" in desk.log(job)
    assert place.names() == {"data-1", "marker-1", "data-2", "marker-2"}


def test_all_that_looks_after_a_done_job_may_be_killed_while_its_files_are_sent(
    desk: Desk, place: Place, proxy: FaultProxy
) -> None:
    """Without any command the job ends as it should."""
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = desk.submit(SAVES + "save 1", head=cached(place))
    assert gate.reached.wait(60), desk.tell(job)
    desk.wait(job, Status.WINDING_DOWN)
    processes.end([uploader(desk, job), *desk.roles(job, "controller")])
    desk.wait_for(job, lambda: len(desk.roles(job, "controller")) == 1, "another controller")
    gate.opened.set()
    desk.wait_for(job, lambda: desk.record(job).life.status.is_final, "the end")
    assert desk.record(job).life.status is Status.SUCCEEDED, desk.tell(job)
    assert place.names() == {"data-1", "marker-1"}


@pytest.mark.slow
def test_random_kills_of_all_there_is_never_show_a_marker_without_its_data(desk: Desk, place: Place) -> None:
    import random

    chance = random.Random(11)
    job = desk.submit(
        SAVES.replace("9000000", "300000")
        + """
        n=$(ls out | sed -n 's/marker-//p' | sort -n | tail -n 1)
        for i in $(seq $((${n:-0} + 1)) 60); do save $i; echo saved $i; sleep 0.05; done
        """,
        head=cached(place),
    )
    with Watcher(place):
        for number in range(1, 9):
            desk.wait_until_said(job, f"saved {6 * number}\n")
            what = chance.choice(["controller", "porter", "warden", "uploader", "node"])
            if what == "node":
                desk.kill_node(job, 0)
            elif what == "uploader":
                processes.end([uploader(desk, job)])
            else:
                processes.end(desk.roles(job, what))
        desk.engine.jobs()
        ended = desk.wait(job)
    assert (ended.status, ended.restarts_after_errors) == (Status.SUCCEEDED, 0), desk.tell(job)
    assert place.names() == {f"{what}-{number}" for what in ("data", "marker") for number in range(1, 61)}


def test_a_failed_job_says_what_is_not_in_its_bucket_and_still_sends_it(
    desk: Desk, place: Place, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = desk.submit(SAVES + "save 1; exit 5", head=cached(place))
    assert gate.reached.wait(60), desk.tell(job)
    ended = desk.wait(job)
    assert ended.status is Status.FAILED
    assert "status 5" in ended.reason
    assert "not all of" in ended.reason
    gate.opened.set()
    desk.wait_for(job, lambda: place.names() == {"data-1", "marker-1"}, "the rest")


def test_a_cancelled_job_ends_at_once_and_its_files_still_go(
    desk: Desk, place: Place, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = desk.submit(SAVES + "save 1; sleep 1000", head=cached(place))
    assert gate.reached.wait(60), desk.tell(job)
    desk.engine.cancel(job.id)
    ended = desk.wait(job)
    assert ended.status is Status.CANCELLED
    assert "not all of" in ended.reason
    gate.opened.set()
    desk.wait_for(job, lambda: place.names() == {"data-1", "marker-1"}, "the rest")


def test_what_keepers_still_write_is_waited_for(desk: Desk) -> None:
    """Something that is called like a keeper outlives `run`, and writes into the mount when it is told to."""
    code = (
        "import pathlib, time\n"
        "pathlib.Path('up').touch()\n"  # until here it is called like the shell that forked it
        "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
        "pathlib.Path('out/late').write_text('x')\n"
    )
    (desk.folder / "keeper.py").write_text(code)
    job = desk.submit(
        f"setsid {sys.executable} {desk.folder}/keeper.py holdfast.keeper & echo early > out/early\n"
        "until [ -e up ]; do sleep 0.02; done",
        head="file_mounts: {out: {name: results, mode: MOUNT_CACHED}}",
    )
    desk.wait_for(job, lambda: desk.files(job).node(1, 0).ended.exists(), "the end of the node")
    assert not desk.engine.job(job.id).status.is_final
    (desk.files(job).workdir(0) / "go").touch()
    assert desk.wait(job).status is Status.SUCCEEDED, desk.tell(job)
    assert {path.name for path in (desk.state / "buckets" / "results").glob("*")} >= {"early", "late"}


def test_nodes_share_a_write_back_directory(desk: Desk, place: Place) -> None:
    job = desk.submit(
        "echo $SKYPILOT_NODE_RANK > out/from-$SKYPILOT_NODE_RANK", head=f"num_nodes: 2\n{cached(place)}"
    )
    assert desk.wait(job).status is Status.SUCCEEDED, desk.tell(job)
    assert place.names() == {"from-0", "from-1"}


def test_a_job_whose_bucket_is_not_there_does_not_begin(
    desk: Desk, s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it can be cancelled while it waits for it."""
    monkeypatch.setenv("HOLDFAST_TRUST_ENDPOINTS", "http://127.0.0.1:9")
    url = s3.home("x", port=9, timeout="1")
    job = desk.submit("echo never", head=f'file_mounts: {{out: {{source: "{url}", mode: MOUNT_CACHED}}}}')
    desk.wait_until_said(job, "Trying again.")
    desk.engine.cancel(job.id)
    assert desk.wait(job).status is Status.CANCELLED
    assert "never" not in desk.log(job)


# -- copies ----------------------------------------------------------------------------------------------


def test_a_bucket_is_copied_once_for_all_attempts(desk: Desk, place: Place, proxy: FaultProxy) -> None:
    large = os.urandom(7 << 20)
    place.store.put("data/a/large", large)
    place.store.put("data/b", b"small")
    place.store.put("data/empty", b"")
    proxy.order("truncate", method="GET", target="large", after_bytes=100_000)
    source = place.url.replace("?", "/data?")
    job = desk.submit(
        "cat in/b one; echo mine > in/b; ls -l in/a; [ $HOLDFAST_ATTEMPT = 2 ] || exit 75; cat in/b",
        head=f'file_mounts: {{in: "{source}", one: "{source.replace("?", "/b?")}"}}\nnum_nodes: 1',
    )
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1), desk.tell(job)
    copy = desk.files(job).copies / "0"
    assert (copy / "a" / "large").read_bytes() == large
    assert (copy / "empty").read_bytes() == b""
    assert "smallsmall" in desk.log(job)
    assert desk.log(job).count("copied s3://") == 2, "once for each mount"
    assert place.store.get("data/b") == b"small", "what was copied is a copy"


def test_a_copy_of_nothing_is_refused(desk: Desk, place: Place) -> None:
    with pytest.raises(NotFound, match="there is nothing at"):
        desk.submit("true", head=f'file_mounts: {{in: "{place.url}"}}')
    assert desk.engine.jobs() == []
