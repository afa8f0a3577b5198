"""Jobs in container images on a real Slurm of two nodes, with podman and docker."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from jobs.containers.images import IMAGE, require
from jobs.harness import write_program
from jobs.slurm.harness import NOTIFIED, READY, SlurmHarness, command

HEAD = f"resources: {{image_id: 'docker:{IMAGE}', cpus: 1}}\n"
pytestmark = pytest.mark.slow


@pytest.fixture(params=["podman", "docker"])
def runtime(
    request: pytest.FixtureRequest, slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return the only container runtime of both nodes, and check that no container of a job is left."""
    require(request.param)
    monkeypatch.setenv("HOLDFAST_SCRATCH", f"{slurm.folder}/disks/$SLURMD_NODENAME")
    if request.param == "docker":
        write_program(slurm.folder / "podman", "exit 1")
        monkeypatch.setenv("PATH", f"{slurm.folder}:{os.environ['PATH']}")
    yield request.param
    for job in slurm.engine.jobs():
        assert containers(request.param, job) == []


def containers(runtime: str, job: Job) -> list[str]:
    """Return the ids of the containers of a job on both nodes."""
    labels = [f"label=holdfast.machine={job.task_id}/{name}" for name in ("n1", "n2")]
    words = [runtime, "ps", "--all", "--quiet", "--no-trunc", "--filter"]
    lists = [subprocess.run([*words, label], capture_output=True, text=True, check=True) for label in labels]
    return [container for listed in lists for container in listed.stdout.split()]


def test_both_nodes_run_in_the_image_in_each_attempt(slurm: SlurmHarness, runtime: str) -> None:
    place = slurm.folder / "place"
    job = slurm.run(
        """
        echo "attempt $HOLDFAST_ATTEMPT has $(cat /srv/installed) and $(cat /srv/marker)"
        echo "on $SLURMD_NODENAME of $SKYPILOT_NUM_NODES: $SETTING"
        echo of $SKYPILOT_NODE_RANK > /data/of-$SKYPILOT_NODE_RANK
        [ $HOLDFAST_ATTEMPT = 2 ] || exit 75
        """,
        setup="[ ! -e /srv/installed ]; echo packages > /srv/installed",
        head=f"{HEAD}num_nodes: 2\nfile_mounts: {{/data: {{source: {place}, mode: MOUNT_CACHED}}}}",
    )
    for rank, name in enumerate(("n1", "n2")):
        log = slurm.log(job, rank)
        for attempt in (1, 2):
            assert f"attempt {attempt} has packages and {IMAGE}\non {name} of 2: of-the-image\n" in log, log
        assert (place / f"of-{rank}").read_text() == f"of {rank}\n"


def test_a_job_of_higher_priority_gets_the_node_without_a_container(
    slurm: SlurmHarness, runtime: str
) -> None:
    job = slurm.submit(NOTIFIED, head=HEAD)
    slurm.wait_for_output(job, "ready")
    assert len(containers(runtime, job)) == 1
    slurm.take_node(command("squeue", "-h", "-j", slurm.slurm_id(job), "-o", "%N"))
    slurm.wait_for(job, lambda: not containers(runtime, job), "the removal of the container")
    assert slurm.succeed(job).recoveries == 1
    assert slurm.log(job).count("told") == 1


@pytest.mark.parametrize("role", ["runner", "warden", "controller"])
def test_what_is_killed_leaves_no_container(slurm: SlurmHarness, runtime: str, role: str) -> None:
    job = slurm.submit(f"[ $HOLDFAST_ATTEMPT = 2 ] && exit 0\n{READY}", head=HEAD)
    slurm.wait_running(job, "ready")
    processes.kill(slurm.roles(job, role))
    if role == "warden":
        slurm.wait_for(job, lambda: slurm.roles(job, "warden"), "another warden")
        processes.kill(slurm.roles(job, "runner"))
    assert slurm.succeed(job).attempt == 2


def test_a_cancelled_job_leaves_no_container(slurm: SlurmHarness, runtime: str) -> None:
    job = slurm.submit(READY, head=f"{HEAD}num_nodes: 2")
    for rank in range(2):
        slurm.wait_for_output(job, "ready", node=rank)
    slurm.cancel(job)
