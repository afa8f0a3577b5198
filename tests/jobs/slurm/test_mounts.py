"""Mounts of Slurm jobs in scratch folders: a stand-in for Slurm, real controllers, a real S3 server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_proxy import FaultProxy
from holdfast.errors import Conflict, InvalidInput
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.mount_records import mounted_below
from holdfast.jobs.node.mounts.scratch import scratch_folder
from holdfast.jobs.status import JobStatus
from jobs.bucket import SAVES, Bucket
from jobs.harness import command_line, needs_namespaces
from jobs.local.test_bucket import needs_fuse
from jobs.slurm.harness import SlurmHarness
from jobs.slurm.node_disks import cache_on, left_on, scratch_roles, uploaders
from jobs.slurm.stand_in import StandIn
from small_disk import small_disk


@pytest.fixture
def slurm(stand_in: StandIn, tmp_path: Path) -> Iterator[SlurmHarness]:
    """Return a harness for the stand-in, and check that no process of its jobs is left."""
    found = SlurmHarness(tmp_path)
    yield found
    for job in found.engine.jobs():
        found.wait_for(job, lambda: not processes_below(tmp_path), "the end of all processes")


def processes_below(folder: Path) -> list[bytes]:
    """Return the command lines of processes that name a path below a folder."""
    found = [b" ".join(command_line(one.pid)) for one in processes.snapshot().values()]
    return [one for one in found if os.fsencode(folder) + b"/" in one]


def kill_all(slurm: SlurmHarness, job: Job, *nodes: str) -> None:
    """Kill everything of a job, as the loss of its machines does."""
    roles = [one for role in ("controller", "runner") for one in slurm.roles(job, role)]
    found = [*roles, *slurm.of_job(job), *scratch_roles(slurm, "mounter")]
    processes.kill([*found, *(one for node in nodes or ["n1"] for one in uploaders(slurm, node))])


def end(slurm: SlurmHarness, job: Job, status: JobStatus = JobStatus.SUCCEEDED) -> Job:
    """Wait until a job has ended with a status, and its controller too."""
    ended = slurm.wait(job, status)
    slurm.wait_for(job, lambda: not slurm.roles(job, "controller"), "the end of the controller")
    return ended


SOON = "config: {slurm: {sbatch_options: {signal: USR1@6}}}"
NAMED = "file_mounts: {out: {name: results, mode: MOUNT_CACHED}}"
ONE_SAVE = SAVES + "if [ $HOLDFAST_ATTEMPT = 1 ]; then save 1; sleep 1000; fi; cat out/marker-1; save 2"


def test_a_job_is_complete_when_its_files_are_in_the_bucket_and_leaves_nothing_on_its_node(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    bucket.store.put("in/x", b"seen")
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = slurm.submit(SAVES + "cat out/in/x; save 1", head=bucket.cached)
    assert gate.reached.wait(600), slurm.describe(job)
    waiting = slurm.wait(job, JobStatus.WINDING_DOWN)
    assert "node 0: not all of" in waiting.reason
    assert bucket.names() == {"in/x"}
    gate.opened.set()
    ended = end(slurm, job)
    assert (ended.reason, ended.attempt) == ("", 1), slurm.describe(job)
    assert "seen" in slurm.log(job)
    assert bucket.names() == {"in/x", "data-1", "marker-1"}
    assert left_on(slurm, "n1") == []
    assert not slurm.files(job).copies.exists(), "the files were on the node only"


def test_a_requeued_job_fetches_on_another_machine_what_the_bucket_has(
    slurm: SlurmHarness, stand_in: StandIn, bucket: Bucket
) -> None:
    run = "[ $HOLDFAST_ATTEMPT = 2 ] || { save 1; exit 75; }; cat out/marker-1; save 2"
    job = slurm.submit(SAVES + run, head=bucket.cached)
    slurm.wait_for_output(job, "attempt 1 of job")
    stand_in.use_nodes("n3")
    assert end(slurm, job).attempt == 2
    assert "attempt 2 of job 1 starts on n3\n" in slurm.log(job)
    assert "\n1\n" in slurm.log(job)
    assert bucket.names() == {"data-1", "marker-1", "data-2", "marker-2"}
    assert left_on(slurm, "n1") == left_on(slurm, "n3") == []


# -- kills -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("what", ["uploader", "mounter"])
def test_an_upload_continues_after_a_kill(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy, what: str
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    job = slurm.submit(SAVES + "save 1; until [ -e go ]; do sleep 0.05; done", head=bucket.cached)
    assert gate.reached.wait(600), slurm.describe(job)
    processes.kill(uploaders(slurm, "n1") if what == "uploader" else scratch_roles(slurm, "mounter"))
    slurm.let_go(job)
    gate.opened.set()
    assert end(slurm, job).attempt == 1
    assert bucket.names() == {"data-1", "marker-1"}


@pytest.mark.parametrize(
    "what", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("runner", "controller")), "all"]
)
def test_files_that_a_kill_has_left_on_the_machine_are_uploaded_before_the_next_attempt(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy, what: str
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    job = slurm.submit(ONE_SAVE, head=bucket.cached)
    assert gate.reached.wait(600), slurm.describe(job)
    if what == "all":
        kill_all(slurm, job)
    else:
        processes.kill(slurm.roles(job, what))
    gate.opened.set()
    assert end(slurm, job).attempt == 2
    assert "\n1\n" in slurm.log(job)
    assert bucket.names() == {"data-1", "marker-1", "data-2", "marker-2"}
    assert left_on(slurm, "n1") == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["runner", "controller"])
def test_a_completed_job_is_not_repeated_when_its_uploads_can_continue(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy, what: str
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = slurm.submit(SAVES + "save 1; echo saved", head=bucket.cached)
    assert gate.reached.wait(600), slurm.describe(job)
    slurm.wait(job, JobStatus.WINDING_DOWN)
    processes.kill(slurm.roles(job, what))
    gate.opened.set()
    assert end(slurm, job).attempt == 1
    assert slurm.log(job).count("saved\n") == 1
    assert bucket.names() == {"data-1", "marker-1"}
    assert left_on(slurm, "n1") == []


@pytest.mark.slow
def test_files_on_a_lost_machine_are_named_and_replace_nothing_later(
    slurm: SlurmHarness, stand_in: StandIn, bucket: Bucket, proxy: FaultProxy
) -> None:
    """Attempt 1 on n1 is lost during an upload, attempt 2 runs on n3, and attempt 3 on n1 again."""
    gate = proxy.hold(method="PUT", target=r"state.*partNumber=2")
    run = """
    echo "found: $(head -c 9 out/state)"
    head -c 9000000 /dev/zero | sed "s/^/attempt $HOLDFAST_ATTEMPT/" > out/state.tmp
    mv out/state.tmp out/state
    [ $HOLDFAST_ATTEMPT = 1 ] && sleep 1000
    [ $HOLDFAST_ATTEMPT = 2 ] && exit 75
    true
    """
    job = slurm.submit(run, head=bucket.cached)
    assert gate.reached.wait(600), slurm.describe(job)
    stand_in.use_nodes("n3")
    kill_all(slurm, job)
    gate.opened.set()
    slurm.wait_for_output(job, "attempt 2 of job 1 starts on n3")
    stand_in.use_nodes("n1")
    assert end(slurm, job).attempt == 3
    history = slurm.files(job).changed.read_text()
    assert "its uploads were not confirmed, and what is missing stays in" in history
    assert str(slurm.folder / "disks" / "n1") in history
    assert "found: attempt 2\n" in slurm.log(job)
    assert "found: attempt 1\n" not in slurm.log(job)
    assert bucket.store.get("state")[:9] == b"attempt 3"
    (aside,) = cache_on(slurm, "n1").glob(".holdfast-writeback/set-aside/*/state")
    assert aside.read_bytes()[:9] == b"attempt 1"
    assert str(aside.parents[1]) in slurm.log(job)


# -- several nodes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_node_has_a_directory_of_its_own_for_the_same_bucket(
    slurm: SlurmHarness, bucket: Bucket
) -> None:
    """Two files of the same name are one object: the last upload wins, and both nodes end."""
    run = "rank=$SKYPILOT_NODE_RANK; echo $rank > out/from-$rank; echo $rank > out/both; ls out; true"
    job = slurm.submit(run, head=f"num_nodes: 2\n{bucket.cached}")
    ended = end(slurm, job)
    assert (ended.attempt, ended.reason) == (1, ""), slurm.describe(job)
    assert bucket.names() == {"from-0", "from-1", "both"}
    assert bucket.store.get("both") in (b"0\n", b"1\n")
    assert "from-1" not in slurm.log(job, 0)
    assert left_on(slurm, "n1") == left_on(slurm, "n2") == []


@pytest.mark.slow
def test_no_node_begins_before_the_leftovers_of_all_nodes_are_uploaded(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    """Otherwise an old file of one node could replace a new one of another."""
    gate = proxy.hold(method="PUT", target=r"both.*partNumber=2")
    run = """
    echo "found: $(head -c 9 out/both)"
    node=$HOLDFAST_ATTEMPT-$SKYPILOT_NODE_RANK
    if [ $node = 1-1 ] || [ $node = 2-0 ]; then
      head -c 9000000 /dev/zero | sed "s/^/attempt $HOLDFAST_ATTEMPT/" > out/both.tmp
      mv out/both.tmp out/both
    fi
    [ $HOLDFAST_ATTEMPT = 1 ] && sleep 1000
    true
    """
    job = slurm.submit(run, head=f"num_nodes: 2\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    slurm.wait_for_output(job, "found:")
    again = proxy.hold(method="PUT", target=r"both.*partNumber=2")
    kill_all(slurm, job, "n1", "n2")
    gate.opened.set()
    assert again.reached.wait(600), slurm.describe(job)
    slurm.wait_for_output(job, "attempt 2 of job 1")
    assert slurm.log(job).count("found:") == 1, "node 0 waits for the upload of node 1"
    again.opened.set()
    assert end(slurm, job).attempt == 2
    for node in range(2):
        assert "found: attempt 1\n" in slurm.log(job, node)
    assert bucket.store.get("both")[:9] == b"attempt 2"


@pytest.mark.slow
def test_two_nodes_with_one_scratch_folder_are_refused(
    slurm: SlurmHarness, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SCRATCH", str(slurm.folder / "disks" / "both"))
    job = slurm.submit("echo never", head=f"num_nodes: 2\n{bucket.cached}")
    end(slurm, job, JobStatus.FAILED_SETUP)
    assert "each node needs a folder of its own" in slurm.log(job, 0) + slurm.log(job, 1)
    assert "never" not in slurm.log(job, 0) + slurm.log(job, 1)


@pytest.mark.slow
def test_uploads_of_two_nodes_continue_after_one_runner_is_killed(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    """Slurm ends the other runner too. What one node has reported as uploaded is not reported as missing."""
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = slurm.submit(SAVES + "save $SKYPILOT_NODE_RANK; echo saved", head=f"num_nodes: 2\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    slurm.wait(job, JobStatus.WINDING_DOWN)
    slurm.wait_for(job, lambda: "marker-0" in bucket.names(), "the upload of node 0")
    processes.kill([slurm.runner(job, 1)])
    gate.opened.set()
    ended = end(slurm, job)
    assert (ended.attempt, ended.reason) == (1, ""), slurm.describe(job)
    assert [slurm.log(job, node).count("saved\n") for node in range(2)] == [1, 1]
    assert bucket.names() == {"data-0", "marker-0", "data-1", "marker-1"}
    assert left_on(slurm, "n1") == left_on(slurm, "n2") == []


# -- the end of the time ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cancelled_job_uploads_until_its_deadline_and_names_what_is_missing(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = slurm.submit(SAVES + "save 1; sleep 1000", head=f"{SOON}\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    slurm.engine.cancel(job.id)
    ended = end(slurm, job, JobStatus.CANCELLED)
    path = cache_on(slurm, "n1")
    assert ended.reason.startswith(f"cancelled; node 0: on n1, not all of {path} is in s3://")
    assert ended.reason in slurm.files(job).changed.read_text()
    assert (path / "marker-1").read_text() == "1\n"
    assert not uploaders(slurm, "n1"), "nothing of a job stays on a node that it has given back"


@pytest.mark.parametrize("is_cancelled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_job_without_success_ends_when_its_files_are_in_the_bucket(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy, is_cancelled: bool
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    options = "config: {slurm: {sbatch_options: {signal: USR1@600}}}"
    run = f"save 1; {'sleep 1000' if is_cancelled else 'exit 5'}"
    job = slurm.submit(SAVES + run, head=f"{options}\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    if is_cancelled:
        slurm.engine.cancel(job.id)
        slurm.wait(job, JobStatus.CANCELLING)
    else:
        slurm.wait_for_output(job, "not all of")
        assert not slurm.engine.job(job.id).status.is_final
    gate.opened.set()
    ended = end(slurm, job, JobStatus.CANCELLED if is_cancelled else JobStatus.FAILED)
    reason = ended.reason.partition("\nThe last lines")[0]
    assert reason == ("cancelled" if is_cancelled else "node 0 failed in run with status 5")
    assert bucket.names() == {"data-1", "marker-1"}
    assert left_on(slurm, "n1") == []


@pytest.mark.slow
def test_a_job_that_is_cancelled_while_leftovers_are_uploaded_names_them(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    job = slurm.submit(SAVES + "save 1; sleep 1000", head=f"{SOON}\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    again = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    kill_all(slurm, job)
    gate.opened.set()
    assert again.reached.wait(600), slurm.describe(job)
    slurm.wait_for_output(job, "uploading what attempt 1 has left")
    slurm.engine.cancel(job.id)
    ended = end(slurm, job, JobStatus.CANCELLED)
    assert f"not all of {cache_on(slurm, 'n1')} is in s3://" in ended.reason
    assert (cache_on(slurm, "n1") / "data-1").stat().st_size == 9_000_000
    assert not uploaders(slurm, "n1")


@pytest.mark.slow
def test_a_job_that_is_complete_but_not_uploaded_when_its_time_is_over_returns(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    """The bucket does not answer at the end. The next start on the same machine uploads what is left."""
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    run = "[ -e out/marker-1 ] || save 1; echo saved"
    job = slurm.submit(SAVES + run, head=f"{SOON}\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    slurm.wait(job, JobStatus.WINDING_DOWN)
    (controller,) = slurm.roles(job, "controller")
    processes.send(controller, signal.SIGUSR1)
    slurm.wait(job, JobStatus.RECOVERING)
    reason = slurm.files(job).changed.read_text()
    assert f"node 0: on n1, not all of {cache_on(slurm, 'n1')} is in s3://" in reason
    gate.opened.set()
    assert end(slurm, job).attempt == 2
    assert slurm.log(job).count("saved\n") == 2
    assert bucket.names() == {"data-1", "marker-1"}


def test_files_that_no_upload_sends_stay_on_the_node_and_are_named(
    slurm: SlurmHarness, bucket: Bucket
) -> None:
    job = slurm.submit("echo 1 > out/file; ln -s file out/link", head=bucket.cached)
    ended = end(slurm, job)
    assert f"not all of {cache_on(slurm, 'n1')}" in ended.reason
    assert "1 left out" in ended.reason
    assert (cache_on(slurm, "n1") / "link").is_symlink()


# -- other mounts ----------------------------------------------------------------------------------------


def test_a_bucket_above_the_limit_is_not_fetched(slurm: SlurmHarness, bucket: Bucket) -> None:
    bucket.store.put("corpus", b"x" * 2_000_000)
    config = "config: {mount_cached: {vfs_cache_max_size: 1M}}"
    head = f'file_mounts: {{out: {{source: "{bucket.url}", mode: MOUNT_CACHED, {config}}}}}'
    with pytest.raises(InvalidInput, match=r"holds at least 2.0 MB.*the limit is 1.0 MB"):
        slurm.submit("true", head=head)
    assert slurm.engine.jobs() == []


@pytest.mark.slow
def test_a_bucket_is_copied_to_each_node(slurm: SlurmHarness, bucket: Bucket) -> None:
    bucket.store.put("a/b", b"seen")
    job = slurm.submit(
        "cat in/a/b; echo mine > in/a/b; [ $HOLDFAST_ATTEMPT = 2 ] || exit 33",
        head="resources: {job_recovery: {recover_on_exit_codes: [33]}}\n"
        f'file_mounts: {{in: "{bucket.url}"}}',
    )
    assert end(slurm, job).attempt == 2
    assert slurm.log(job).count("copied s3://") == 1, "once for all attempts in an allocation"
    assert bucket.store.get("a/b") == b"seen"
    assert left_on(slurm, "n1") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["out", pytest.param(f"/holdfast-test-{os.getpid()}", marks=needs_namespaces, id="private")]
)
def test_a_named_bucket_is_a_folder_that_all_nodes_see(slurm: SlurmHarness, target: str) -> None:
    job = slurm.submit(
        f"echo $SKYPILOT_NODE_RANK > {target}/$SKYPILOT_NODE_RANK; ls {target}",
        head=f"num_nodes: 2\nfile_mounts: {{{target}: {{name: results, mode: MOUNT_CACHED}}}}",
    )
    end(slurm, job)
    found = slurm.folder / "state" / "buckets" / "results"
    assert {path.name: path.read_text() for path in found.glob("?")} == {"0": "0\n", "1": "1\n"}
    assert not Path(target).exists()


def test_a_target_in_the_home_is_a_link_until_the_job_has_ended(
    slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(slurm.folder))
    head = "file_mounts: {~/out: {name: results, mode: MOUNT_CACHED}}"
    job = slurm.submit("echo 1 > ~/out/a; readlink ~/out; until [ -e go ]; do sleep 0.05; done", head=head)
    slurm.wait_for_output(job, str(slurm.folder / "disks" / "n1"))
    with pytest.raises(Conflict, match="job 1 has a mount there until it has ended"):
        slurm.submit("true", head=head)
    slurm.let_go(job)
    end(slurm, job)
    assert (slurm.folder / "state" / "buckets" / "results" / "a").read_text() == "1\n"
    assert not (slurm.folder / "out").is_symlink()


@pytest.mark.slow
def test_a_target_in_the_home_needs_the_same_path_on_all_nodes(
    slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(slurm.folder))
    head = "num_nodes: 2\nfile_mounts: {~/out: {name: results, mode: MOUNT_CACHED}}"
    ended = end(slurm, slurm.submit("echo never", head=head), JobStatus.FAILED_CONTROLLER)
    assert "have different paths" in ended.reason
    assert "relative to the workdir" in ended.reason


@pytest.mark.essential
@needs_fuse
def test_a_bucket_is_mounted_on_each_node(slurm: SlurmHarness, bucket: Bucket) -> None:
    bucket.store.put("in/x", b"seen")
    job = slurm.submit(
        "cat b/in/x; echo $SKYPILOT_NODE_RANK > b/from-$SKYPILOT_NODE_RANK",
        head=f'num_nodes: 2\nfile_mounts: {{b: {{source: "{bucket.url}", mode: MOUNT}}}}',
    )
    end(slurm, job)
    assert "seen" in slurm.log(job, 0)
    assert bucket.names() == {"in/x", "from-0", "from-1"}
    assert mounted_below(slurm.folder) == []
    assert left_on(slurm, "n1") == left_on(slurm, "n2") == []


def test_a_node_that_cannot_mount_a_bucket_reports_what_it_lacks(
    slurm: SlurmHarness, stand_in: StandIn, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = slurm.folder / "programs"
    programs.mkdir()
    for name in ("bash", "setsid", "cat", "paste", "rm", "kill", "touch"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", f"{stand_in.folder}:{programs}")
    job = slurm.submit("echo never", head=f'file_mounts: {{b: {{source: "{bucket.url}", mode: MOUNT}}}}')
    ended = end(slurm, job, JobStatus.FAILED_SETUP)
    assert "requires the program rclone" in ended.reason
    assert "mode: MOUNT_CACHED" in ended.reason


# -- scratch folders that cannot be used -----------------------------------------------------------------


def test_a_folder_planted_at_the_path_of_the_scratch_folder_is_not_used(
    slurm: SlurmHarness, stand_in: StandIn
) -> None:
    stand_in.will("hold")
    job = slurm.submit("echo never", head=NAMED)
    victim = slurm.folder / "victim"
    victim.mkdir(mode=0o700)
    scratch = scratch_folder(slurm.folder / "disks" / "n1", slurm.files(job), job.task_id or "")
    scratch.path.parent.mkdir(parents=True)
    scratch.path.symlink_to(victim)
    stand_in.release()
    ended = end(slurm, job, JobStatus.FAILED_SETUP)
    assert f"{scratch.path} already exists, and is not a private folder of yours" in ended.reason
    assert list(victim.iterdir()) == []


def test_a_scratch_folder_that_cannot_be_created_ends_the_job(
    slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SCRATCH", "/proc/nowhere")
    ended = end(slurm, slurm.submit("echo never", head=NAMED), JobStatus.FAILED_SETUP)
    assert "Cannot create /proc/nowhere, which HOLDFAST_SCRATCH names" in ended.reason


def test_a_full_disk_is_named(slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(slurm.folder, "64k") as disk:
        monkeypatch.setenv("HOLDFAST_SCRATCH", str(disk))
        with contextlib.suppress(OSError):
            (disk / "ballast").write_bytes(b"x" * 100_000)
        ended = end(slurm, slurm.submit("echo never", head=NAMED), JobStatus.FAILED_SETUP)
    assert "No space left on device" in ended.reason
