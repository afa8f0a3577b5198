"""Pipelines: each job starts once the one before has succeeded, whichever controller is killed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from holdfast.errors import Conflict, Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.records import Records, Submission
from holdfast.jobs.registry import get_engine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import parse_tasks
from jobs.harness import JobHarness

WAITS = "echo begun\nuntil [ -e go ]; do sleep 0.02; done\necho done"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("HOME", str(found))
    return found


def submit(harness: JobHarness, *runs: str, head: str = "") -> list[Job]:
    """Submit a pipeline with a task for each script."""
    tasks = [f"name: t{i}\n{head}\nrun: |\n{textwrap.indent(run, '  ')}\n" for i, run in enumerate(runs)]
    text = "---\n".join(["name: pipe\n", *tasks])
    return harness.engine.submit_file(parse_tasks(text, str(harness.folder / "task.yaml")))


def statuses(harness: JobHarness) -> list[JobStatus]:
    return [job.status for job in harness.engine.jobs()]


@pytest.mark.essential
def test_the_next_job_starts_after_success(harness: JobHarness) -> None:
    a, b, c = submit(harness, WAITS, WAITS, "echo last")
    assert [(job.id, job.name, job.after) for job in (a, b, c)] == [
        (1, "t0", None),
        (2, "t1", 1),
        (3, "t2", 2),
    ]
    harness.wait_running(a, "begun")
    waiting = harness.engine.job(2)
    assert (waiting.status, waiting.reason) == (JobStatus.PENDING, "waits for job 1")
    assert not harness.log(b)
    harness.let_go(a)
    harness.wait_for_output(b, "begun")
    assert harness.engine.job(1).status is JobStatus.SUCCEEDED
    assert not harness.log(c)
    harness.let_go(b)
    harness.succeed(c)
    assert [job.attempt for job in harness.engine.jobs()] == [1, 1, 1]
    assert harness.log(c).splitlines()[1:] == ["last"]
    assert "waits for" not in harness.log(c)


def test_its_jobs_have_the_variables_of_one_job_of_skypilot(harness: JobHarness) -> None:
    show = "echo $SKYPILOT_MANAGED_JOB_ID $SKYPILOT_TASK_ID; echo $SKYPILOT_TASK_IDS; echo job $HOLDFAST_JOB"
    a, b = submit(harness, show, show)
    harness.wait(b)
    for number, job in enumerate((a, b)):
        assert job.task_id.endswith(f"_pipe_t{number}_1-{number}")
        lines = [f"1 {job.task_id}", f"{a.task_id} {b.task_id}", f"job {job.id}"]
        assert harness.log(job).splitlines()[1:] == lines


def test_jobs_after_a_failure_are_cancelled(harness: JobHarness) -> None:
    _, b, c = submit(harness, "exit 3", "echo never", "echo never")
    assert harness.wait(c).status is JobStatus.CANCELLED
    assert statuses(harness) == [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.CANCELLED]
    assert harness.engine.job(b.id).reason == "job 1 (t0), which comes first, is FAILED"
    assert harness.engine.job(b.id).attempt == 0
    assert "never" not in harness.log(b) + harness.log(c)


def test_a_waiting_job_may_be_cancelled_alone(harness: JobHarness) -> None:
    """Those after it are cancelled too, and the one before it continues."""
    a, _, c, d = submit(harness, WAITS, "true", "true", "true")
    harness.wait_for_output(a, "begun")
    harness.engine.cancel(c.id)
    assert harness.wait(d).status is JobStatus.CANCELLED
    with pytest.raises(Conflict):
        harness.engine.preempt(c.id, lead_s=0)
    harness.let_go(a)
    harness.wait(harness.engine.job(2))
    expected = [JobStatus.SUCCEEDED, JobStatus.SUCCEEDED, JobStatus.CANCELLED, JobStatus.CANCELLED]
    assert statuses(harness) == expected


def test_a_recovery_of_one_job_keeps_the_others_waiting(harness: JobHarness) -> None:
    a, b = submit(harness, "[ $HOLDFAST_ATTEMPT = 2 ] || exit 75", "echo after")
    harness.succeed(b)
    assert harness.engine.job(a.id).attempt == 2
    assert harness.log(b).splitlines()[1:] == ["after"]


@pytest.mark.slow
@pytest.mark.parametrize("victims", ["running", "waiting", "both"])
def test_a_killed_controller_costs_nothing(harness: JobHarness, victims: str) -> None:
    """Without any command: job 2 starts after job 1, and runs once."""
    a, b, c = submit(harness, WAITS, WAITS, "echo last")
    harness.wait_for_output(a, "begun")
    harness.wait_for(a, lambda: harness.roles(b, "controller"), "the controller of the next job")
    if victims in ("running", "both"):
        harness.kill_controller(a)
    if victims in ("waiting", "both"):
        harness.kill_controller(b)
    harness.let_go(a)
    harness.wait_for_output(b, "begun")
    harness.let_go(b)
    harness.wait_for_output(c, "last")
    assert [harness.wait(job).status for job in (a, b, c)] == [JobStatus.SUCCEEDED] * 3
    assert [harness.log(job).count("attempt 1") for job in (a, b, c)] == [1, 1, 1]


def test_a_controller_killed_between_two_jobs_continues_with_the_right_one(harness: JobHarness) -> None:
    """Job 1 has succeeded, and no process is left that could start job 2, until the next command."""
    a, b = submit(harness, WAITS, "echo second $HOLDFAST_ATTEMPT")
    harness.wait_for_output(a, "begun")
    harness.wait_for(a, lambda: harness.roles(b, "controller"), "the controller of the next job")
    processes.kill([*harness.roles(b, "controller"), *harness.roles(a, "controller")])
    agents = harness.roles(a, "agent")
    harness.let_go(a)
    harness.wait_for_output(a, "done")
    processes.wait_exited(agents, 60)
    processes.kill([*harness.roles(b, "controller"), *harness.roles(a, "controller")])
    harness.succeed(b)
    assert harness.engine.job(a.id).attempt == 1
    assert harness.log(b).count("second 1") == 1


def test_jobs_of_a_pipeline_may_mount_at_the_same_path(harness: JobHarness, home: Path) -> None:
    (harness.folder / "data").write_text("text")
    mounts = f"file_mounts: {{~/data: {harness.folder}/data, ~/out: {{name: shared, mode: MOUNT}}}}"
    runs = ("cp ~/data ~/out/a; echo changed > ~/data", "cat ~/data ~/out/a >> ~/out/b", "cat ~/data ~/out/b")
    *_, c = submit(harness, *runs, head=mounts)
    harness.succeed(c)
    assert harness.log(c).splitlines()[1:] == ["texttexttext"], "each has a copy of its own"
    harness.wait_for(c, lambda: not (home / "data").exists(), "the removal of the link")


def test_a_pipeline_is_prepared_as_a_whole_or_not_at_all(harness: JobHarness, home: Path) -> None:
    (home / "sky_workdir").mkdir()
    with pytest.raises(Conflict, match="already exists"):
        submit(harness, "echo first", "ls ~/sky_workdir/../x")
    assert harness.engine.jobs() == []
    assert not [path for path in (harness.state / "jobs").iterdir() if path.is_dir()]


def test_an_interrupted_launch_starts_nothing(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job is recorded last. Without it, the others never start."""
    complete = Records.complete

    def complete_others(self: Records, submission: Submission) -> None:
        if submission.spec.after is None:
            raise KeyboardInterrupt
        complete(self, submission)

    monkeypatch.setattr(Records, "complete", complete_others)
    with pytest.raises(KeyboardInterrupt):
        submit(harness, "echo first", "echo second")
    (left,) = harness.engine.jobs()
    assert (left.id, left.status, left.reason) == (2, JobStatus.PENDING, "waits for job 1")
    assert not harness.roles(left, "controller")
    harness.cancel(left)


def test_a_job_on_which_another_waits_is_not_removed(harness: JobHarness) -> None:
    a, b = submit(harness, "true", WAITS)
    harness.wait_for_output(b, "begun")
    with pytest.raises(Conflict, match=r"comes before job 2 \(t1\) in a pipeline"):
        harness.engine.forget(a.id)
    harness.finish(b)
    harness.engine.forget(a.id)
    assert [job.id for job in harness.engine.jobs()] == [2]


@pytest.mark.parametrize("engine", ["slurm", "sky", "k8s", "kubeflow"])
def test_other_engines_refuse_pipelines_with_the_way_out(engine: str, harness: JobHarness) -> None:
    file = parse_tasks("run: x\n---\nrun: y\n", "task.yaml")
    for call in (get_engine(engine).check_file, get_engine(engine).submit_file):
        with pytest.raises(Unsupported, match=r"task\.yaml: a pipeline of 2 tasks: .*Nothing was started\.$"):
            call(file)
