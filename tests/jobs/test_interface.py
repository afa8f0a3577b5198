"""The Python interface of jobs, as a script uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import jobs
from holdfast.cli import main
from holdfast.errors import Conflict, InvalidInput, NotFound, TimedOut
from jobs.harness import JobHarness

WAITS = """
envs: {WHO: x}
run: |
  trap 'exit 75' TERM
  echo begins $WHO
  until [ -e go ]; do sleep 0.02; done
"""


@pytest.fixture
def task(harness: JobHarness) -> Path:
    path = harness.folder / "task.yaml"
    path.write_text(WAITS)
    return path


def test_a_job_is_launched_followed_and_described(harness: JobHarness, task: Path) -> None:
    job = jobs.launch(task, name="mine", envs={"WHO": "you"})
    assert (job.name, job.engine, jobs.job("mine").id) == ("mine", "local", job.id)
    for line in jobs.logs(job.id, follow=True):
        if line.text == "begins you":
            assert line.node == 0
            assert line.unix_s is not None
            harness.let_go(job)
    (ended,) = jobs.wait(job.id)
    assert (ended.status, ended.exit_status) == (jobs.JobStatus.SUCCEEDED, 0)
    assert [line.text for line in jobs.logs("mine", tail=1)] == ["begins you"]
    found = jobs.describe("mine")
    assert found.job == ended
    assert [one.number for one in found.attempts] == [1]
    assert found.durations.total_s >= found.durations.running_s
    jobs.forget(job.id)
    with pytest.raises(NotFound):
        jobs.job(job.id)


def test_jobs_are_listed_preempted_cancelled_and_waited_for(harness: JobHarness, task: Path) -> None:
    first, second = (jobs.launch(str(task), name=name) for name in ("a", "b"))
    assert [job.id for job in jobs.queue()] == [second.id, first.id]
    with pytest.raises(TimedOut, match="2 jobs did not end in time"):
        jobs.wait("a", "b", timeout=0)
    harness.wait_for_output(first, "begins")
    harness.wait(first, jobs.JobStatus.RUNNING)
    jobs.preempt("a", lead="60s")
    harness.wait_for_output(first, "begins", times=2)
    with pytest.raises(NotFound, match="no job named 'c'"):
        jobs.cancel("c", "a", second.id)
    ended = jobs.wait("a", "b")
    assert {job.status for job in ended} == {jobs.JobStatus.CANCELLED}
    assert jobs.queue(statuses=["RUNNING"]) == []
    assert len(jobs.queue(on="local", statuses=[jobs.JobStatus.CANCELLED])) == 2
    with pytest.raises(Conflict, match="already ended"):
        jobs.cancel(first.id)
    with pytest.raises(InvalidInput, match="Unknown status"):
        jobs.queue(statuses=["GONE"])
    with pytest.raises(NotFound, match="Job 9 does not exist"):
        jobs.forget(9, first.id)
    assert [job.id for job in jobs.queue()] == [second.id]
    assert jobs.cancel(every=True) == []


def test_what_cannot_be_cancelled_keeps_nothing_else_running(
    harness: JobHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    old = harness.submit("true", head="name: old")
    running = [harness.submit("exec sleep 1000") for _ in range(2)]
    harness.wait(old)
    words = ["no-such", str(running[0].id), str(old.id), str(running[1].id)]
    assert main(["cancel", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"job {one.id} (task) is being cancelled" for one in running]
    assert f"Job {old.id} has already ended: SUCCEEDED" in shown.err
    assert "no job named 'no-such'" in shown.err
    assert {job.status for job in jobs.wait(*(one.id for one in running))} == {jobs.JobStatus.CANCELLED}
    with pytest.raises(Conflict, match=f"Job {old.id} .*\nJob 2 has already ended: CANCELLED"):
        jobs.cancel(old.id, 2)
    with pytest.raises(NotFound, match="Job 9 does not exist"):
        jobs.wait(9, old.id)
    with pytest.raises(NotFound, match="Job 9 does not exist"):
        jobs.forget(9, "old")
    assert [job.id for job in jobs.queue()] == [3, 2]


def test_all_names_are_public() -> None:
    for name in jobs.__all__:
        assert getattr(jobs, name) is not None
    with pytest.raises(AttributeError):
        _ = jobs.nothing  # pyright: ignore[reportAttributeAccessIssue]
