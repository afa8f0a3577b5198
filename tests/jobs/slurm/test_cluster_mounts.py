"""Mounts of jobs on a real Slurm of two nodes, each with its own disk: preemptions, requeues and kills."""

from __future__ import annotations

import random

import pytest

from fault_proxy import FaultProxy
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.mount_records import mounted_below
from holdfast.jobs.status import JobStatus
from jobs.bucket import MANY_SAVES, SAVES, Bucket, Watcher
from jobs.local.test_bucket import needs_fuse
from jobs.slurm.harness import SlurmHarness, command
from jobs.slurm.node_disks import cache_on, left_on, scratch_roles, uploaders

pytestmark = pytest.mark.slow
ONE = "resources: {cpus: 1}"
ON_N1 = "config: {slurm: {sbatch_options: {nodelist: n1, cpus_per_task: 1}}}"


@pytest.fixture(autouse=True)
def _disks(slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of its own for each node."""
    monkeypatch.setenv("HOLDFAST_SCRATCH", f"{slurm.folder}/disks/$SLURMD_NODENAME")


def test_two_nodes_write_into_one_bucket(slurm: SlurmHarness, bucket: Bucket) -> None:
    bucket.store.put("corpus", b"seen")
    job = slurm.submit(
        "cat out/corpus; echo $SKYPILOT_NODE_RANK > out/from-$SKYPILOT_NODE_RANK",
        head=f"num_nodes: 2\n{ONE}\n{bucket.cached}",
    )
    assert slurm.succeed(job).reason == ""
    assert bucket.names() == {"corpus", "from-0", "from-1"}
    assert left_on(slurm, "n1") == left_on(slurm, "n2") == []


@needs_fuse
def test_a_bucket_is_mounted_and_copied_on_two_nodes(slurm: SlurmHarness, bucket: Bucket) -> None:
    bucket.store.put("in/x", b"seen")
    copied = bucket.url.replace("?", "/in?")
    job = slurm.run(
        "cat b/in/x c/x; echo $SKYPILOT_NODE_RANK > b/from-$SKYPILOT_NODE_RANK",
        head=f"num_nodes: 2\n{ONE}\n"
        f'file_mounts: {{b: {{source: "{bucket.url}", mode: MOUNT}}, c: "{copied}"}}',
    )
    assert "seenseen" in slurm.log(job, 0)
    assert "seenseen" in slurm.log(job, 1)
    assert bucket.names() == {"in/x", "from-0", "from-1"}
    assert mounted_below(slurm.folder) == []
    assert left_on(slurm, "n1") == left_on(slurm, "n2") == []


def test_a_preempted_job_uploads_before_it_gives_its_node_back(slurm: SlurmHarness, bucket: Bucket) -> None:
    job = slurm.submit(
        SAVES
        + """
        if [ $HOLDFAST_ATTEMPT = 1 ]; then
          trap 'save 1; exit 75' TERM
          echo ready
          while true; do sleep 0.05; done
        fi
        cat out/marker-1; save 2
        """,
        head=f"{ONE}\n{bucket.cached}",
    )
    slurm.wait_for_output(job, "ready")
    slurm.take_node(command("squeue", "-h", "-j", slurm.slurm_id(job), "-o", "%N"))
    assert slurm.succeed(job).attempt == 2
    assert "not all of" not in slurm.files(job).changed.read_text()
    assert bucket.names() == {"data-1", "marker-1", "data-2", "marker-2"}
    assert left_on(slurm, "n1") == left_on(slurm, "n2") == []


@pytest.mark.parametrize("what", ["requeue", "controller", "runner", "all"])
def test_what_a_kill_has_left_is_uploaded_by_the_next_attempt_on_the_machine(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy, what: str
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=2")
    job = slurm.submit(
        SAVES + "if [ $HOLDFAST_ATTEMPT = 1 ]; then save 1; sleep 1000; fi; cat out/marker-1; save 2",
        head=f"{ON_N1}\n{bucket.cached}",
    )
    assert gate.reached.wait(600), slurm.describe(job)
    if what == "requeue":
        command("scontrol", "requeue", slurm.slurm_id(job))
    elif what == "all":
        roles = [one for role in ("controller", "runner") for one in slurm.roles(job, role)]
        mounts = [*scratch_roles(slurm, "mounter"), *uploaders(slurm, "n1")]
        processes.kill([*roles, *slurm.of_job(job), *mounts])
    else:
        processes.kill(slurm.roles(job, what))
    slurm.wait_for_output(job, "attempt 2 of job")
    gate.opened.set()
    assert slurm.succeed(job).attempt == 2
    assert "\n1\n" in slurm.log(job)
    assert bucket.names() == {"data-1", "marker-1", "data-2", "marker-2"}
    assert left_on(slurm, "n1") == []


@pytest.mark.parametrize("what", ["runner", "controller"])
def test_a_completed_job_is_not_repeated_when_its_uploads_can_continue(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy, what: str
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = slurm.submit(SAVES + "save 1; echo saved", head=f"{ON_N1}\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    slurm.wait(job, JobStatus.WINDING_DOWN)
    processes.kill(slurm.roles(job, what))
    gate.opened.set()
    assert slurm.succeed(job).attempt == 1
    assert slurm.log(job).count("saved\n") == 1
    assert bucket.names() == {"data-1", "marker-1"}
    assert left_on(slurm, "n1") == []


def test_a_cancellation_in_slurm_names_what_is_missing(
    slurm: SlurmHarness, bucket: Bucket, proxy: FaultProxy
) -> None:
    gate = proxy.hold(method="PUT", target=r"data-1.*partNumber=1")
    job = slurm.submit(SAVES + "save 1; sleep 1000", head=f"{ON_N1}\n{bucket.cached}")
    assert gate.reached.wait(600), slurm.describe(job)
    command("scancel", slurm.slurm_id(job))
    ended = slurm.wait(job, JobStatus.CANCELLED)
    assert ended.reason.startswith("cancelled in Slurm; node 0: ")
    assert f"not all of {cache_on(slurm, 'n1')} is in s3://" in ended.reason
    assert (cache_on(slurm, "n1") / "data-1").stat().st_size == 9_000_000


def test_random_kills_never_show_a_marker_without_its_data(slurm: SlurmHarness, bucket: Bucket) -> None:
    """Of any process of the job, and of requeues. Nothing that was saved is missing at the end."""
    chance = random.Random(20261124)
    job = slurm.submit(MANY_SAVES, head=f"{ON_N1}\n{bucket.cached}")
    with Watcher(bucket):
        for number in range(1, 9):
            slurm.wait_for_output(job, f"saved {6 * number}\n")
            what = chance.choice(["controller", "mounter", "uploader", "runner", "requeue"])
            if what == "requeue":
                command("scontrol", "requeue", slurm.slurm_id(job))
            elif what == "uploader":
                processes.kill(uploaders(slurm, "n1"))
            else:
                processes.kill([*slurm.roles(job, what), *scratch_roles(slurm, what)])
        assert slurm.succeed(job).restarts_after_errors == 0
    assert bucket.names() == {f"{what}-{number}" for what in ("data", "marker") for number in range(1, 61)}
    assert left_on(slurm, "n1") == []
