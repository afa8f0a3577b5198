"""Mounts of jobs, with a real S3 server behind a proxy that delays requests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fault_proxy import FaultProxy
from holdfast.errors import InvalidInput, NotFound
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.mount_records import caches
from holdfast.jobs.status import JobStatus
from holdfast.jobs.writeback import status_of
from jobs.bucket import MANY_SAVES, SAVES, Bucket, Watcher
from jobs.harness import JobHarness
from servers import Server


def uploader(harness: JobHarness, job: Job) -> processes.Process:
    """Return the running uploader of the job's first write-back directory."""
    path = caches(harness.files(job))[0].path
    found: list[processes.Process] = []

    def is_there() -> bool:
        pid = status_of(path).pid if Path(path, ".holdfast-writeback").exists() else None
        process = processes.find(pid) if pid else None
        found.extend([process] if process else [])
        return bool(found)

    harness.wait_for(job, is_there, "an uploader")
    return found[0]


@pytest.mark.slow
def test_a_named_bucket_is_written_through_a_write_back_directory(harness: JobHarness) -> None:
    link = harness.folder / "out"
    head = f"file_mounts: {{{link}: {{name: results, mode: MOUNT_CACHED}}}}"
    job = harness.run(f"echo 1 > {link}/a; mkdir {link}/d; echo 2 > {link}/d/b", head=head)
    assert job.reason == ""
    bucket = harness.state / "buckets" / "results"
    assert [(bucket / name).read_text() for name in ("a", "d/b")] == ["1\n", "2\n"]
    harness.wait_for(job, lambda: not link.is_symlink(), "the removal of the link, after the job's end")
    again = harness.run(f"cat {link}/d/b", head=head)
    assert "2\n" in harness.log(again), "another job sees what the bucket holds"


def test_a_job_is_not_complete_before_its_files_are_in_the_bucket(
    harness: JobHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = harness.submit(SAVES + "save 1", head=bucket.cached)
    with Watcher(bucket):
        assert gate.reached.wait(600), harness.describe(job)
        waiting = harness.wait(job, JobStatus.WINDING_DOWN)
        assert "waiting" in waiting.reason
        assert not status_of(harness.files(job).workdir(0) / "out").is_drained
        assert bucket.names() == set()
        gate.opened.set()
        ended = harness.wait(job)
    assert (ended.status, ended.reason, ended.attempt) == (JobStatus.SUCCEEDED, "", 1)
    assert bucket.names() == {"data-1", "marker-1"}
    assert "all files of the job are in its bucket" in harness.log(job)


@pytest.mark.slow
def test_a_preempted_job_uploads_its_files_before_it_recovers(harness: JobHarness, bucket: Bucket) -> None:
    job = harness.submit(
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
        head=bucket.cached,
    )
    with Watcher(bucket):
        harness.wait_running(job, "ready")
        harness.engine.preempt(job.id, lead_s=600)
        harness.wait_for_output(job, "attempt 2 of job")
        assert bucket.names() == {"data-1", "marker-1"}
        harness.wait_for_output(job, "\n1\n")
        ended = harness.finish(job)
    assert (ended.status, ended.recoveries) == (JobStatus.SUCCEEDED, 1), harness.describe(job)
    assert bucket.names() == {"data-1", "marker-1", "data-2", "marker-2"}


def test_files_that_a_lost_node_had_not_uploaded_are_available_to_the_next_attempt(
    harness: JobHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    """Node, uploader and all others are killed in the middle of an upload."""
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    job = harness.submit(
        SAVES
        + """
        if [ $HOLDFAST_ATTEMPT = 1 ]; then save 1; echo saved; sleep 1000; fi
        cat out/marker-1
        save 2
        """,
        head=bucket.cached,
    )
    with Watcher(bucket):
        harness.wait_for_output(job, "saved")
        assert gate.reached.wait(600)
        processes.kill([uploader(harness, job)])
        harness.kill_node(job, 0)
        gate.opened.set()
        assert harness.succeed(job).recoveries == 1
    assert "\n1\n" in harness.log(job)
    assert bucket.names() == {"data-1", "marker-1", "data-2", "marker-2"}


@pytest.mark.essential
def test_a_completed_job_survives_kills_during_its_upload(
    harness: JobHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    """The job ends correctly without any command."""
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = harness.submit(SAVES + "save 1", head=bucket.cached)
    assert gate.reached.wait(600), harness.describe(job)
    harness.wait(job, JobStatus.WINDING_DOWN)
    processes.kill([uploader(harness, job), *harness.roles(job, "controller")])
    harness.wait_for(job, lambda: harness.has_controller(job), "another controller")
    gate.opened.set()
    assert harness.end_without_command(job)[0] is JobStatus.SUCCEEDED, harness.describe(job)
    assert bucket.names() == {"data-1", "marker-1"}


@pytest.mark.slow
def test_random_kills_never_show_a_marker_without_its_data(harness: JobHarness, bucket: Bucket) -> None:
    import random

    chance = random.Random(11)
    job = harness.submit(MANY_SAVES, head=bucket.cached)
    with Watcher(bucket):
        for number in range(1, 9):
            harness.wait_for_output(job, f"saved {6 * number}\n")
            what = chance.choice(["controller", "mounter", "agent", "uploader", "node"])
            if what == "node":
                harness.kill_node(job, 0)
            elif what == "uploader":
                processes.kill([uploader(harness, job)])
            else:
                processes.kill(harness.roles(job, what))
        harness.engine.jobs()
        assert harness.succeed(job).restarts_after_errors == 0
    assert bucket.names() == {f"{what}-{number}" for what in ("data", "marker") for number in range(1, 61)}


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["failed", "cancelled"])
def test_a_job_without_success_ends_at_once_with_what_is_missing_and_still_uploads_it(
    harness: JobHarness, bucket: Bucket, proxy: FaultProxy, is_cancelled: bool
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = harness.submit(SAVES + f"save 1; {'sleep 1000' if is_cancelled else 'exit 5'}", head=bucket.cached)
    assert gate.reached.wait(600), harness.describe(job)
    if is_cancelled:
        harness.engine.cancel(job.id)
    ended = harness.wait(job)
    assert ended.status is (JobStatus.CANCELLED if is_cancelled else JobStatus.FAILED)
    assert is_cancelled or "status 5" in ended.reason
    assert "not all of" in ended.reason
    files = harness.files(job)
    harness.wait_for(job, files.without_secrets.exists, "the removal of the secrets")
    assert not files.environment.exists(), "the uploader has the keys of the bucket in its process"
    gate.opened.set()
    harness.wait_for(job, lambda: bucket.names() == {"data-1", "marker-1"}, "the rest")


@pytest.mark.slow
def test_files_that_keepers_still_write_are_waited_for(harness: JobHarness) -> None:
    """A process named like a keeper outlives `run`, and later writes into the mount."""
    (harness.folder / "keeper.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path('up').touch()\n"  # until here it is called like the shell that forked it
        "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
        "pathlib.Path('out/late').write_text('x')\n"
    )
    job = harness.submit(
        f"setsid {sys.executable} {harness.folder}/keeper.py holdfast.checkpoint.keeper &\n"
        "echo early > out/early\n"
        "until [ -e up ]; do sleep 0.02; done",
        head="file_mounts: {out: {name: results, mode: MOUNT_CACHED}}",
    )
    harness.wait_for(job, lambda: harness.files(job).node(1, 0).ended.exists(), "the end of the node")
    assert not harness.engine.job(job.id).status.is_final
    harness.let_go(job)
    harness.succeed(job)
    assert {path.name for path in (harness.state / "buckets" / "results").glob("*")} >= {"early", "late"}


@pytest.mark.slow
def test_nodes_share_a_write_back_directory(harness: JobHarness, bucket: Bucket) -> None:
    run = "echo $SKYPILOT_NODE_RANK > out/from-$SKYPILOT_NODE_RANK"
    harness.run(run, head=f"num_nodes: 2\n{bucket.cached}")
    assert bucket.names() == {"from-0", "from-1"}


def test_a_job_whose_bucket_is_unreachable_does_not_start(
    harness: JobHarness, s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be cancelled while it waits."""
    monkeypatch.setenv("HOLDFAST_TRUST_ENDPOINTS", "http://127.0.0.1:9")
    url = s3.home("x", port=9, timeout="1")
    job = harness.submit("echo never", head=f'file_mounts: {{out: {{source: "{url}", mode: MOUNT_CACHED}}}}')
    harness.wait_for_output(job, "Trying again.")
    harness.cancel(job)
    assert "never" not in harness.log(job)


@pytest.mark.usefixtures("bucket")  # trusts the server
def test_why_names_the_mount_that_failed_and_no_setup_that_the_task_has_not(
    harness: JobHarness, s3: Server
) -> None:
    url = s3.home("x").replace("s3://test/", "s3://none-such/")
    head = f'file_mounts: {{out: {{source: "{url}", mode: MOUNT_CACHED}}}}'
    why = harness.wait(harness.submit("echo never", head=head)).reason.partition("\n")[0]
    assert why.startswith("node 0 could not start: "), why
    assert "none-such" in why
    assert "setup" not in why


# -- copies ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bucket_is_copied_once_for_all_attempts(
    harness: JobHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    large = os.urandom(7 << 20)
    bucket.store.put("data/a/large", large)
    bucket.store.put("data/b", b"small")
    bucket.store.put("data/empty", b"")
    proxy.inject("truncate", method="GET", target="large", after_bytes=100_000)
    source = bucket.url.replace("?", "/data?")
    job = harness.submit(
        "cat in/b one; echo mine > in/b; ls -l in/a; [ $HOLDFAST_ATTEMPT = 2 ] || exit 75; cat in/b",
        head=f'file_mounts: {{in: "{source}", one: "{source.replace("?", "/b?")}"}}\nnum_nodes: 1',
    )
    assert harness.succeed(job).recoveries == 1
    copy = harness.files(job).copies / "0"
    assert (copy / "a" / "large").read_bytes() == large
    assert (copy / "empty").read_bytes() == b""
    assert "smallsmall" in harness.log(job)
    assert harness.log(job).count("copied s3://") == 2, "once for each mount"
    assert bucket.store.get("data/b") == b"small", "what was copied is a copy"


def test_copying_a_missing_source_is_rejected(harness: JobHarness, bucket: Bucket) -> None:
    with pytest.raises(NotFound, match="nothing exists at"):
        harness.submit("true", head=f'file_mounts: {{in: "{bucket.url}"}}')
    assert harness.engine.jobs() == []


def test_copies_are_removed_when_an_ended_job_has_uploaded_them(harness: JobHarness, bucket: Bucket) -> None:
    """Three jobs at once on one bucket, of which nothing stays on this machine."""
    bucket.store.put("corpus", b"x" * 2_000_000)
    jobs = [
        harness.submit(f"wc -c < out/corpus; echo {number} > out/result-{number}", head=bucket.cached)
        for number in range(3)
    ]
    for job in jobs:
        harness.succeed(job)
        (spec,) = caches(harness.files(job))
        harness.wait_for(job, lambda path=Path(spec.path): not path.exists(), "the removal of the copies")
        assert "2000000" in harness.log(job)
        assert harness.engine.job(job.id).reason == ""
    assert bucket.names() == {"corpus", "result-0", "result-1", "result-2"}


@pytest.mark.parametrize(
    "left", ["ln -s corpus out/link", "echo x > out/unfinished.tmp"], ids=["link", "unfinished"]
)
def test_a_directory_with_files_that_are_not_uploaded_stays(
    harness: JobHarness, bucket: Bucket, left: str
) -> None:
    job = harness.run(f"echo 1 > out/corpus; {left}; exit 1", head=bucket.cached, ends=JobStatus.FAILED)
    harness.wait_for(job, lambda: not harness.roles(job, "mounter"), "the end of the uploads")
    harness.wait_for(job, lambda: not harness.roles(job, "controller"), "the end of the controller")
    (spec,) = caches(harness.files(job))
    assert len({"link", "unfinished.tmp"} & {path.name for path in Path(spec.path).iterdir()}) == 1
    assert (Path(spec.path) / "corpus").exists()


def test_a_bucket_above_the_limit_is_not_downloaded(harness: JobHarness, bucket: Bucket) -> None:
    def head(limit: str) -> str:
        config = f"config: {{mount_cached: {{vfs_cache_max_size: {limit}}}}}"
        return f'file_mounts: {{out: {{source: "{bucket.url}", mode: MOUNT_CACHED, {config}}}}}'

    bucket.store.put("corpus", b"x" * 2_000_000)
    with pytest.raises(InvalidInput, match=r"holds at least 2.0 MB.*the limit is 1.0 MB.*vfs_cache_max_size"):
        harness.submit("true", head=head("1M"))
    with pytest.raises(InvalidInput, match=r"expected a size, such as 50G, or off, found 'much'"):
        harness.submit("true", head=head("much"))
    assert not harness.engine.jobs()
    for limit in ("2M", "'off'"):
        harness.run("cat out/corpus | wc -c", head=head(limit))


@pytest.mark.slow
def test_a_bucket_that_grows_above_the_limit_ends_the_job(harness: JobHarness, bucket: Bucket) -> None:
    bucket.store.put("corpus", b"x" * 900_000)
    gate = harness.folder / "go"
    job = harness.submit(
        f"[ $HOLDFAST_ATTEMPT = 1 ] || exit 0; echo up; until [ -e {gate} ]; do sleep 0.05; done; exit 75",
        head=f'file_mounts: {{out: {{source: "{bucket.url}", mode: MOUNT_CACHED, '
        "config: {mount_cached: {vfs_cache_max_size: 1M}}}}",
    )
    harness.wait_for_output(job, "up")
    bucket.store.put("more", b"x" * 2_000_000)
    gate.touch()
    ended = harness.wait(job)
    assert ended.status in (JobStatus.FAILED, JobStatus.FAILED_SETUP), harness.describe(job)
    assert "more than its limit of 1.0 MB" in harness.log(job)
    assert "failed in setup" not in ended.reason
