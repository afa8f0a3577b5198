"""Secrets and folders of Slurm jobs after their end, with a stand-in for Slurm and real controllers."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from holdfast.errors import NotFound, RetryLater
from holdfast.jobs.description import describe_job
from holdfast.jobs.output import OutputSelection
from holdfast.jobs.slurm import controller
from holdfast.jobs.status import JobStatus
from jobs.harness import holders
from jobs.slurm.harness import SlurmHarness
from jobs.slurm.stand_in import StandIn

SECRET = "s3cret-7f1c"
SUBMIT = """
from holdfast.jobs.slurm.engine import SlurmEngine
from holdfast.jobs.task.parser import Overrides, parse_tasks

SlurmEngine().submit_file(parse_tasks("run: x", "task.yaml", Overrides(secrets={"TOKEN": "s3cret-7f1c"})))
"""


@pytest.mark.parametrize(
    ("run", "expected"), [("true", JobStatus.SUCCEEDED), ("exit 7", JobStatus.FAILED)], ids=["0", "7"]
)
def test_a_job_that_has_ended_has_no_secrets(desk: SlurmHarness, run: str, expected: JobStatus) -> None:
    gate = desk.folder / "go"
    job = desk.submit(
        f"[ ${{#TOKEN}} = {len(SECRET)} ] && echo up; until [ -e {gate} ]; do sleep 0.02; done; {run}",
        TOKEN=SECRET,
    )
    desk.wait_for_output(job, "up")
    assert sorted(holders(desk.files(job).path, SECRET)) == ["environment.json"], "while it runs"
    gate.touch()
    desk.wait_for(job, lambda: not holders(desk.files(job).path, SECRET), "the removal, without a command")
    ended = desk.wait(job, expected)
    assert len(describe_job(ended).attempts) == 1
    assert "up" in [line.text for line in desk.engine.lines(job.id, OutputSelection())]
    desk.engine.forget(job.id)
    assert not desk.files(job).path.exists()


def test_the_next_command_removes_secrets_that_a_killed_controller_has_left(desk: SlurmHarness) -> None:
    job = desk.submit_and_kill("jobs.ended", lambda: desk.submit("true", TOKEN=SECRET))
    desk.succeed(job)
    assert not holders(desk.files(job).path, SECRET)


def test_a_job_without_its_secrets_is_not_started_again(
    desk: SlurmHarness, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator may requeue a job that was cancelled in Slurm, and found to be ended."""
    stand_in.will("wait")
    job = desk.submit("echo ran", TOKEN=SECRET)
    (stand_in.folder / "running").unlink()  # Slurm has forgotten it
    assert desk.wait(job).status is JobStatus.FAILED_CONTROLLER
    assert not holders(desk.files(job).path, SECRET)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert controller.supervise(desk.files(job)) == controller.FAILED
    found = desk.files(job).read_state().job_state
    assert found.status is JobStatus.FAILED_CONTROLLER
    assert "its variables and secrets were removed" in found.reason
    assert "ran" not in desk.log(job)


def test_a_submission_that_slurm_refuses_leaves_nothing(desk: SlurmHarness, stand_in: StandIn) -> None:
    stand_in.will("refuse")
    with pytest.raises(RetryLater, match="invalid partition"):
        desk.submit("true", TOKEN=SECRET)
    jobs = desk.folder / "state" / "jobs"
    assert [path.name for path in jobs.iterdir() if path.is_dir()] == []
    assert not holders(desk.folder / "state", SECRET)
    with pytest.raises(NotFound):
        desk.engine.job(1)
    (stand_in.folder / "refuse").unlink()
    assert desk.run("true").id == 2, "a number is never used again"


def test_forget_completes_the_removal_of_a_refused_submission(
    desk: SlurmHarness, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = desk.run("true")
    stand_in.will("refuse")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda folder, ignore_errors: None)
        with pytest.raises(RetryLater, match="invalid partition"):
            desk.submit("true", TOKEN=SECRET)
    jobs = desk.folder / "state" / "jobs"
    assert (jobs / ".removing-2").is_dir()
    desk.engine.forget(ended.id)
    assert [path.name for path in jobs.iterdir() if path.is_dir()] == []


def test_a_submission_whose_launch_was_killed_can_be_cancelled_and_removed(
    desk: SlurmHarness, stand_in: StandIn
) -> None:
    stand_in.will("kill")
    done = subprocess.run([sys.executable, "-c", SUBMIT], check=False)
    assert done.returncode == -signal.SIGKILL
    (job,) = desk.engine.jobs()
    assert (job.status, job.engine_job_id) == (JobStatus.PENDING, None)
    assert holders(desk.files(job).path, SECRET)
    assert desk.engine.cancel(job.id).status is JobStatus.CANCELLED
    assert not holders(desk.files(job).path, SECRET)
    desk.engine.forget(job.id)
    assert not desk.files(job).path.exists()
