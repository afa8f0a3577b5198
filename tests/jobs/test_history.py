"""Attempts and durations, from the changes of a job."""

from __future__ import annotations

from holdfast.jobs.history import Change, list_attempts, measure
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.state_machine import JobState, exit_status
from holdfast.jobs.status import JobStatus

LOST = {0: Outcome(Phase.RUN)}
CHANGES = [
    Change(10.0, JobStatus.STARTING, 1, True),
    Change(12.0, JobStatus.RUNNING, 1, True),
    Change(20.0, JobStatus.RUNNING, 1, True, "preemption notice"),
    Change(30.0, JobStatus.RECOVERING, 1, False, "node 0 was lost", LOST, step=5, saved_unix_s=25.0),
    Change(31.0, JobStatus.RECOVERING, 2, True, "node 0 was lost"),
    Change(32.0, JobStatus.RECOVERING, 2, True, "preemption notice"),
    Change(33.0, JobStatus.RECOVERING, 2, False, "preemption notice", step=5, saved_unix_s=25.0),
    Change(34.0, JobStatus.RECOVERING, 3, True, "preemption notice"),
    Change(36.0, JobStatus.RUNNING, 3, True),
    Change(46.0, JobStatus.SUCCEEDED, 3, False, "", {0: Outcome(Phase.RUN, code=0)}, step=9),
]


def test_attempts_have_their_times_reasons_and_losses() -> None:
    first, second, third = list_attempts(CHANGES)
    assert (first.started_unix_s, first.running_unix_s, first.ended_unix_s) == (10.0, 12.0, 30.0)
    assert (first.reason, first.outcomes, first.step, first.lost_s) == ("node 0 was lost", LOST, 5, 5.0)
    assert (second.running_unix_s, second.ended_unix_s, second.lost_s) == (None, 33.0, 0.0)
    assert (third.status, third.ended_unix_s, third.lost_s) == (JobStatus.SUCCEEDED, 46.0, 0.0)
    (running,) = list_attempts(CHANGES[:2])
    assert (running.ended_unix_s, running.status) == (None, JobStatus.RUNNING)
    assert list_attempts([]) == []


def test_durations_are_measured_by_status() -> None:
    found = measure(CHANGES, submitted_unix_s=8.0, until_unix_s=46.0)
    assert (found.total_s, found.running_s, found.down_s) == (38.0, 28.0, 6.0)
    found = measure(CHANGES[:2], submitted_unix_s=8.0, until_unix_s=22.0)
    assert (found.total_s, found.running_s, found.down_s) == (14.0, 10.0, 0.0)
    backwards = measure(CHANGES[:2], submitted_unix_s=8.0, until_unix_s=1.0)
    assert (backwards.total_s, backwards.running_s) == (0.0, 0.0)


def test_a_job_has_the_exit_status_of_its_own_failure() -> None:
    stopped = Outcome(Phase.RUN, killed_by=9, is_stopped=True)
    failed = JobState(JobStatus.FAILED, outcomes={0: stopped, 1: Outcome(Phase.RUN, code=3)})
    assert exit_status(failed) == 3
    killed = JobState(JobStatus.FAILED, outcomes={0: Outcome(Phase.RUN, killed_by=11)})
    assert exit_status(killed) == 139
    assert exit_status(JobState(JobStatus.FAILED, outcomes=LOST)) == 1
    assert exit_status(JobState(JobStatus.CANCELLED)) == 1
    assert exit_status(JobState(JobStatus.SUCCEEDED, outcomes={0: Outcome(Phase.RUN, code=0)})) == 0
    assert exit_status(JobState(JobStatus.RUNNING)) == 0
