"""The Python interface of jobs, as a script uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import jobs
from holdfast.cli import main
from holdfast.errors import Conflict, InvalidInput, NotFound, RetryLater, TimedOut
from holdfast.jobs import interface
from holdfast.jobs.registry import get_engine
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


class BusyEngine:
    """The local engine, which fails to read the state of one job a number of times, and then cancels it."""

    poll_s = 0.01

    def __init__(self, number: int, num_failures: int) -> None:
        self.number, self.left = number, num_failures

    def job(self, number: int) -> jobs.Job:
        engine = get_engine("local")
        if number == self.number and self.left:
            self.left -= 1
            if not self.left:
                engine.cancel(number)
            raise RetryLater("The scheduler does not answer.")
        return engine.job(number)


def test_waiting_goes_on_while_the_state_of_a_job_cannot_be_read(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = harness.submit("exec sleep 1000")
    busy = BusyEngine(job.id, 3)
    monkeypatch.setattr(interface, "get_engine", lambda _: busy)
    (ended,) = jobs.wait(job.id)
    assert ended.status is jobs.JobStatus.CANCELLED


def test_a_job_whose_state_cannot_be_read_for_long_does_not_keep_others_from_being_waited_for(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, other = (harness.submit("exec sleep 1000") for _ in range(2))
    busy = BusyEngine(lost.id, 10**9)
    monkeypatch.setattr(interface, "get_engine", lambda _: busy)
    monkeypatch.setattr(interface, "_PATIENCE_S", 0.05)
    get_engine("local").cancel(other.id)
    found = list(interface.wait_each(lost.id, other.id))
    assert [one.id for one in found if isinstance(one, jobs.Job)] == [other.id]
    assert [type(one) for one in found if not isinstance(one, jobs.Job)] == [RetryLater]
    get_engine("local").cancel(lost.id)


def test_all_names_are_public() -> None:
    for name in jobs.__all__:
        assert getattr(jobs, name).__module__.startswith("holdfast.jobs.")
    with pytest.raises(AttributeError):
        _ = jobs.nothing  # pyright: ignore[reportAttributeAccessIssue]
