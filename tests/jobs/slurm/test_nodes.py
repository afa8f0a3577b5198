"""Nodes that stand out on a real cluster: left out of restarts and of new jobs, until they are cleared."""

from __future__ import annotations

import time

import pytest

from holdfast.jobs import clear_node, nodes
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import state_dir
from holdfast.jobs.machines import MachineEvent, add_events
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from jobs.slurm.harness import SlurmHarness, command

pytestmark = [pytest.mark.slow, pytest.mark.alone]
SHOW = 'echo "here is $SLURMD_NODENAME"'
WAIT = f"{SHOW}\n[ $HOLDFAST_ATTEMPT -gt 1 ] || sleep 1000\n"


def remember(num_lost: int) -> None:
    """Add lost attempts of n1, and as many good ones of n2 as make a third loss stand out."""
    now_s = time.time()
    lost = [MachineEvent(now_s, "n1", f"old-{n}", 1, is_lost=True, why="was lost") for n in range(num_lost)]
    add_events(state_dir(), [*lost, *(MachineEvent(now_s, "n2", f"good-{n}", 1) for n in range(12))])


def standing_out() -> list[str]:
    return [one.name for one in nodes() if one.stands_out]


def excluded(slurm: SlurmHarness, job: Job) -> str:
    """Return the nodes that Slurm leaves out for a job."""
    shown = command("scontrol", "--oneliner", "show", "job", slurm.slurm_id(job))
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)["ExcNodeList"]


def test_a_node_that_stands_out_is_left_out_of_the_restart_and_of_new_jobs(slurm: SlurmHarness) -> None:
    remember(2)
    job = slurm.submit(WAIT)
    slurm.wait_for_output(job, "here is n1")
    assert standing_out() == []
    processes.kill([slurm.runner(job, 0)])
    ended = slurm.succeed(job)
    assert "here is n2" in slurm.log(job), slurm.describe(job)
    assert ended.attempt == 2
    assert standing_out() == ["n1"]
    assert excluded(slurm, job) == "n1"

    assert "here is n2" in slurm.log(slurm.run(SHOW))
    clear_node("n1")
    assert "here is n1" in slurm.log(slurm.run(SHOW))


def test_a_job_that_needs_all_nodes_runs_on_those_that_stand_out_too(slurm: SlurmHarness) -> None:
    remember(5)
    assert standing_out() == ["n1"]
    assert "here is n1" in slurm.log(slurm.run(SHOW, head="num_nodes: 2"), 0)
    pinned = slurm.run(SHOW, head="config: {slurm: {sbatch_options: {nodelist: n1}}}")
    assert "here is n1" in slurm.log(pinned)


def test_nodes_that_the_user_leaves_out_stay_left_out(slurm: SlurmHarness) -> None:
    remember(5)
    job = slurm.run(SHOW, head="config: {slurm: {sbatch_options: {exclude: n2}}}")
    assert "here is n1" in slurm.log(job), "both cannot be left out"
    assert excluded(slurm, job) == "n2"


def test_a_job_whose_first_node_fails_leaves_it_too(slurm: SlurmHarness) -> None:
    """Its controller dies with the node, so Slurm starts the job again, and the new controller looks."""
    remember(2)
    job = slurm.submit(WAIT)
    slurm.wait_for_output(job, "here is n1")
    processes.kill([*slurm.roles(job, "controller"), slurm.runner(job, 0)])
    slurm.succeed(job)
    assert "here is n2" in slurm.log(job), slurm.describe(job)
    assert standing_out() == ["n1"]


def test_a_job_whose_home_cannot_be_written_to_ends_with_that(slurm: SlurmHarness) -> None:
    report = 'echo "{\\"home\\": \\"/sys/kernel\\", \\"step\\": $HOLDFAST_ATTEMPT}" >> "$HOLDFAST_PROGRESS"'
    ended = slurm.run(f"{report}; exit 75", ends=JobStatus.FAILED, HOLDFAST_NODE_CHECKS="stop")
    first = ended.reason.partition("\n")[0]
    assert "is not fit for the job: disk /sys/kernel: it cannot be written to" in first, slurm.describe(ended)
    assert sum(one.failed_checks.get("disk", 0) for one in nodes()) >= 1
    assert standing_out() == [], "it is the same everywhere"
