"""Running jobs whose records are deleted, truncated, zeroed or replaced by old copies: none is harmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import Corrupt
from holdfast.jobs.engine import Job
from holdfast.jobs.records import Records
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

WAITS = """
echo attempt $HOLDFAST_ATTEMPT begins
until [ -e go ]; do sleep 0.02; done
echo attempt $HOLDFAST_ATTEMPT is done
"""


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


DAMAGES = pytest.mark.parametrize(
    "damage", [_delete, *(pytest.param(one, marks=pytest.mark.slow) for one in (_truncate, _zero))]
)
CONTROLLERS = pytest.mark.parametrize("has_controller", [True, False], ids=["controlled", "alone"])


def start(harness: JobHarness) -> Job:
    """Start a job that waits for a file, and return it while it runs."""
    job = harness.submit(WAITS)
    harness.wait_for_output(job, "begins")
    return harness.wait(job, JobStatus.RUNNING)


def commands_of(harness: JobHarness, job: Job) -> set[int]:
    """Return the processes of a job's commands, without those that the shell starts again and again."""
    return {one.pid for one in harness.of_job(job) if one.pid == one.session}


def finish(harness: JobHarness, job: Job, *, attempt: int = 1) -> None:
    """Let a job finish, and check that no attempt was lost."""
    harness.let_go(job)
    assert harness.succeed(job).attempt == attempt
    assert harness.log(job).count("begins") == attempt


def check_another_launch(harness: JobHarness, job: Job) -> None:
    """Check that a launch gets a number and folder of its own, and leaves a job alone."""
    running = commands_of(harness, job)
    assert running
    other = harness.submit("true")
    assert other.id == job.id + 1
    harness.succeed(other)
    assert commands_of(harness, job) == running


@pytest.mark.parametrize("what", ["journal", "submission"])
@CONTROLLERS
@DAMAGES
def test_a_lost_journal_or_copy_of_a_submission_costs_no_attempt(
    harness: JobHarness, damage: Callable[[Path], None], has_controller: bool, what: str
) -> None:
    job = start(harness)
    running = commands_of(harness, job)
    first, second = harness.files(job).submissions
    intact = second.read_bytes()
    if not has_controller:
        harness.kill_controller(job)
    damage(harness.files(job).states if what == "journal" else first)
    check_another_launch(harness, job)
    assert commands_of(harness, job) == running
    harness.wait(job, JobStatus.RUNNING)
    finish(harness, job)
    assert first.read_bytes() == second.read_bytes() == intact, "the next change repairs it"


@DAMAGES
def test_a_controller_restores_a_record_of_which_nothing_is_left(
    harness: JobHarness, damage: Callable[[Path], None]
) -> None:
    job = start(harness)
    files = harness.files(job)
    for path in (files.states, *files.submissions):
        damage(path)
    with pytest.raises(Corrupt, match=f"The record of job {job.id} is"):
        harness.engine.job(job.id)
    assert len(Records(harness.state).unreadable()) == 1
    other = harness.submit("true")
    assert other.id == job.id + 1
    (files.workdir(0) / "go").touch()
    harness.wait_for_output(job, "is done")
    harness.wait_for(job, lambda: not Records(harness.state).unreadable(), "the record")
    harness.succeed(job)
    harness.wait(other)


@CONTROLLERS
def test_an_old_copy_of_a_journal_costs_no_attempt(harness: JobHarness, has_controller: bool) -> None:
    job = start(harness)
    files = harness.files(job)
    old = files.states.read_bytes()
    harness.kill_node(job, 0)
    harness.wait_running(job, "attempt 2 begins")
    if not has_controller:
        harness.kill_controller(job)
    files.states.write_bytes(old)
    check_another_launch(harness, job)
    assert harness.wait(job, JobStatus.RUNNING).attempt == 2
    finish(harness, job, attempt=2)


def test_a_cancelled_job_is_not_restarted_after_its_journal_was_lost(harness: JobHarness) -> None:
    job = start(harness)
    harness.cancel(job)
    history = harness.files(job).history
    harness.wait_for(job, lambda: "CANCELLED" in history.read_text(), "the history")
    harness.files(job).states.unlink()
    assert harness.engine.job(job.id).status is JobStatus.CANCELLED
    history.unlink()
    assert harness.wait(job).status is JobStatus.CANCELLED
    assert harness.log(job).count("begins") == 1


def test_a_folder_that_launch_did_not_make_is_never_removed(harness: JobHarness) -> None:
    """A launch that fails removes only the folder that it has created."""
    precious = harness.state / "jobs" / "1" / "nodes" / "0" / "workdir"
    precious.mkdir(parents=True)
    (precious / "file").write_text("precious")
    (harness.folder / "task").mkdir()
    with pytest.raises(OSError, match="does not exist"):
        harness.submit("true", head=f"workdir: {harness.folder / 'missing'}")
    job = harness.submit("true")
    assert job.id == 2
    harness.wait(job)
    harness.engine.forget(job.id)
    assert (precious / "file").read_text() == "precious"
    assert not harness.files(job).path.exists()
