"""Notifications of Slurm jobs, sent by their controllers, and by the next command after a kill."""

from __future__ import annotations

import json

import pytest

from holdfast import jobs
from holdfast.jobs.engine import Job
from holdfast.jobs.status import JobStatus
from holdfast.system.linux import locks
from holdfast.system.linux.processes import start_time
from jobs.harness import holders
from jobs.notifications.receiver import SECRET, Receiver
from jobs.slurm.harness import SlurmHarness


def launch(slurm: SlurmHarness, run: str, *targets: str, on: str = "running,recovering,ended") -> Job:
    task = slurm.folder / "task.yaml"
    task.write_text(f"name: t\nrun: |\n  {run}\n")
    return jobs.launch(task, on="slurm", notify=targets, notify_on=[on])


def wait_for_end(slurm: SlurmHarness, job: Job) -> Job:
    plan = slurm.files(job).notify_plan
    slurm.wait_for(job, lambda: not plan.exists(), "the last notification, without a command")
    return slurm.wait(job)


def test_the_controller_sends_each_status(desk: SlurmHarness, receiver: Receiver) -> None:
    receiver.answers = [200, 404]
    job = launch(desk, "env", receiver.url)
    assert wait_for_end(desk, job).status is JobStatus.SUCCEEDED
    assert receiver.statuses == ["RUNNING", "SUCCEEDED"]
    assert {body["engine"] for body in receiver.bodies} == {"slurm"}
    errors = [one.error for one in jobs.describe(job.id).notifications]
    assert errors == ["", "the server answered with status 404"]
    assert "was not sent to webhook 1" in desk.files(job).output.read_text()
    assert not holders(desk.files(job).path, SECRET)


def test_variables_with_targets_do_not_reach_the_job(
    desk: SlurmHarness, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_NOTIFY", receiver.url)
    task = desk.folder / "task.yaml"
    task.write_text("run: env\n")
    job = jobs.launch(task, on="slurm", notify_on=["ended"])
    monkeypatch.delenv("HOLDFAST_NOTIFY")
    wait_for_end(desk, job)
    assert receiver.statuses == ["SUCCEEDED"]
    assert "HOLDFAST_NOTIFY" not in desk.log(job)
    assert not holders(desk.files(job).path, SECRET)


@pytest.mark.parametrize("point", ["jobs.recorded:3", "jobs.notified:1"])
def test_the_next_command_sends_what_killed_processes_have_left(
    desk: SlurmHarness, receiver: Receiver, point: str
) -> None:
    job = desk.submit_and_kill(point, lambda: launch(desk, "true", receiver.url, on="ended"))
    assert desk.wait(job).status is JobStatus.SUCCEEDED
    lock = desk.files(job).notifier_lock  # the mark is older than the kill
    desk.wait_for(job, lambda: not locks.is_held(lock), "the end of the killed notifier")
    desk.engine.jobs()
    wait_for_end(desk, job)
    assert set(receiver.statuses) == {"SUCCEEDED"}
    assert len(receiver.bodies) == (1 if point == "jobs.recorded:3" else 2)


def test_a_job_that_slurm_has_removed_before_its_start_is_notified_of(
    desk: SlurmHarness, receiver: Receiver
) -> None:
    stand_in = desk.folder / "bin"
    (stand_in / "wait").touch()
    job = launch(desk, "true", receiver.url)
    (stand_in / "running").unlink()
    desk.wait(job, JobStatus.FAILED_CONTROLLER)
    wait_for_end(desk, job)
    assert receiver.statuses == ["FAILED_CONTROLLER"]
    assert not holders(desk.files(job).path, SECRET)


def test_the_batch_script_waits_for_the_last_notification(desk: SlurmHarness, receiver: Receiver) -> None:
    """Slurm kills all processes of a job when its batch script has ended."""
    receiver.gate.clear()
    job = launch(desk, "true", receiver.url, on="ended")
    files = desk.files(job)
    desk.wait_for(job, lambda: receiver.bodies and files.without_secrets.exists(), "the end")
    script = int((desk.folder / "bin" / "running").read_text())
    for _ in range(20):
        assert start_time(script) is not None
        desk.engine.jobs()  # asks the stand-in, which takes a while
    receiver.gate.set()
    wait_for_end(desk, job)
    desk.wait_for(job, lambda: start_time(script) is None, "the end of the batch script")


@pytest.mark.slow
def test_a_real_cluster_sends_before_it_ends_the_job(slurm: SlurmHarness, receiver: Receiver) -> None:
    run = f"[ $HOLDFAST_ATTEMPT = 2 ] || exit 75; cat > {slurm.folder}/nothing < /dev/null"
    job = launch(slurm, run, f"cat >> {slurm.folder}/received", receiver.url)
    assert wait_for_end(slurm, job).status is JobStatus.SUCCEEDED
    expected = [("RUNNING", 1), ("RECOVERING", 1), ("RUNNING", 2), ("SUCCEEDED", 2)]
    received = [json.loads(line) for line in (slurm.folder / "received").read_text().splitlines()]
    for bodies in (received, receiver.bodies):
        found = [(body["status"], body["attempt"]) for body in bodies]
        # Slurm kills the controller's node between the attempts, so one may be sent twice.
        assert list(dict.fromkeys(found)) == expected
    assert not holders(slurm.files(job).path, SECRET)
