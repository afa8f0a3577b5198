"""Jobs in container images on Slurm: a container per node and attempt, of which none is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs import describe
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import parse_tasks
from jobs.containers.images import IMAGE
from jobs.containers.stand_in import StandIn as RuntimeStandIn
from jobs.harness import needs_namespaces, write_program
from jobs.slurm.harness import SlurmHarness
from jobs.slurm.stand_in import StandIn

HEAD = f"resources: {{image_id: 'docker:{IMAGE}'}}\n"
UNTIL_GO = "until [ -e go ]; do sleep 0.05; done"


@pytest.fixture
def slurm(stand_in: StandIn, tmp_path: Path) -> Iterator[SlurmHarness]:
    """Return a harness for the stand-in, and check that no warden is left."""
    found = SlurmHarness(tmp_path)
    yield found
    for job in found.engine.jobs():
        found.wait_for(job, lambda job=job: not found.roles(job, "warden"), "the end of the wardens")
    found.leave()


@pytest.fixture
def runtime(slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeStandIn]:
    """Return a stand-in for podman on all nodes, and check that it has no containers at the end."""
    found = RuntimeStandIn(slurm.folder / "runtime")
    found.add_image(IMAGE, HOME="/srv/home")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    yield found
    assert found.containers() == []


@pytest.mark.slow
@needs_namespaces
def test_each_node_runs_its_part_in_the_image_and_setup_again_in_each_attempt(
    slurm: SlurmHarness, runtime: RuntimeStandIn
) -> None:
    job = slurm.submit(
        """
        echo "attempt $HOLDFAST_ATTEMPT in $(cat /srv/marker) has $(cat /srv/installed) on $SLURMD_NODENAME"
        echo of $SKYPILOT_NODE_RANK > ~/out/of-$SKYPILOT_NODE_RANK
        [ $HOLDFAST_ATTEMPT = 2 ] || exit 75
        """,
        setup="[ ! -e /srv/installed ]; echo packages > /srv/installed; echo set up",
        head=f'{HEAD}num_nodes: 2\nfile_mounts: {{~/out: {{source: "{slurm.folder}/place", '
        "mode: MOUNT_CACHED}}",
    )
    slurm.succeed(job)
    for rank, name in enumerate(("n1", "n2")):
        log = slurm.log(job, rank)
        for attempt in (1, 2):
            assert f"attempt {attempt} in {IMAGE} has packages on {name}\n" in log, log
        assert log.count("set up\n") == 2
        assert (slurm.folder / "place" / f"of-{rank}").read_text() == f"of {rank}\n"
    assert len(runtime.calls("create")) == 4
    assert not Path("/srv/installed").exists(), "outside"


def test_a_node_without_a_runtime_ends_the_job_and_runs_nothing(
    slurm: SlurmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = slurm.folder / "without"
    for name in ("podman", "docker"):
        write_program(programs / name, "exit 1")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    job = slurm.run("echo on the node itself", head=HEAD, ends=JobStatus.FAILED_SETUP)
    assert "neither podman nor docker answers on n1" in job.reason + slurm.log(job), job.reason
    assert "on the node itself" not in slurm.log(job)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("also", ["", "warden"])
def test_a_container_that_a_killed_runner_has_left_is_removed(
    slurm: SlurmHarness, runtime: RuntimeStandIn, also: str
) -> None:
    """By its warden, or if Slurm has killed that too, by the next attempt on the machine."""
    job = slurm.submit(f"echo up; [ $HOLDFAST_ATTEMPT = 2 ] || {UNTIL_GO}; cat /srv/marker", head=HEAD)
    slurm.wait_for_output(job, "up")
    (left,) = runtime.containers()
    processes.kill([*slurm.roles(job, also or "runner"), slurm.runner(job, 0)])
    slurm.succeed(job)
    assert ("an earlier attempt has left here" in slurm.log(job)) == bool(also)
    assert f"removing the container {left[:12]}" in slurm.log(job) or not also
    assert slurm.log(job).endswith(f"up\n{IMAGE}\n")


@pytest.mark.slow
@needs_namespaces
def test_a_job_that_is_cancelled_while_its_image_is_pulled_ends(
    slurm: SlurmHarness, runtime: RuntimeStandIn
) -> None:
    runtime.will("wait")
    job = slurm.submit("true", head="resources: {image_id: 'docker:an/image'}")
    slurm.wait_for_output(job, "Trying to pull")
    slurm.engine.cancel(job.id)
    slurm.wait(job, JobStatus.CANCELLED)


def notes(slurm: SlurmHarness, head: str) -> list[str]:
    """Return the keys that a launch of a task notes."""
    return [
        one.key for one in slurm.engine.unsupported_keys(parse_tasks(f"{head}\nrun: x", "task.yaml").only())
    ]


def test_a_launch_notes_images_that_holdfast_does_not_run(slurm: SlurmHarness) -> None:
    assert notes(slurm, HEAD) == []
    assert notes(slurm, "resources: {image_id: ami-1}") == ["resources.image_id"]
    pyxis = "config: {slurm: {sbatch_options: {container_image: an/image}}}"
    assert notes(slurm, HEAD + pyxis) == ["resources.image_id"]
    with pytest.raises(InvalidInput, match=r"resources\.image_id: expected docker:IMAGE"):
        slurm.submit("x", head="resources: {image_id: 'docker:--privileged'}")
    assert slurm.engine.jobs() == []


@needs_namespaces
def test_paths_of_checkpoints_are_described_as_they_are_outside(
    slurm: SlurmHarness, runtime: RuntimeStandIn
) -> None:
    job = slurm.submit(
        """echo "{\\"home\\": \\"$HOME/run/a\\", \\"step\\": 7}" >> $HOLDFAST_PROGRESS""",
        head=f"{HEAD}file_mounts: {{~/run: {{name: progress, mode: MOUNT}}}}",
    )
    slurm.succeed(job)
    assert runtime.calls("create")
    assert describe(job.id).checkpoints == {str(slurm.folder / "state" / "buckets" / "progress" / "a"): 7}
