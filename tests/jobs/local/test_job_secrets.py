"""Secrets of jobs on this machine: in their folders while they run, and nowhere below them afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from holdfast.jobs.description import describe_job
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.output import OutputSelection
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness, holders

SECRET = "s3cret-7f1c"
INHERITED = "inherited-91ab"
WAITS = "echo up; until [ -e go ]; do sleep 0.02; done"


@pytest.fixture(autouse=True)
def inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a secret in the environment in which jobs are launched."""
    monkeypatch.setenv("MY_PASSWORD", INHERITED)


def secrets_in(harness: JobHarness, job: Job) -> list[str]:
    """Return the files below a job's folder that contain a secret."""
    return holders(harness.files(job).path, SECRET, INHERITED)


def wait_without_secrets(harness: JobHarness, job: Job) -> None:
    """Wait until no file of a job contains a secret, with no further command."""
    harness.wait_for(job, lambda: not secrets_in(harness, job), "the removal of the secrets")


def check_usable(harness: JobHarness, job: Job) -> None:
    """Check that a job without secrets is described and removed as before."""
    ended = harness.engine.job(job.id)
    found = describe_job(ended)
    assert len(found.attempts) == ended.attempt
    assert sum(1 for _ in harness.engine.lines(job.id, OutputSelection())) >= ended.attempt
    harness.engine.forget(job.id)
    assert not harness.files(job).path.exists()


@pytest.mark.parametrize(
    ("run", "setup", "expected"),
    [
        ("true", "", JobStatus.SUCCEEDED),
        ("exit 7", "", JobStatus.FAILED),
        ("true", "exit 7", JobStatus.FAILED_SETUP),
        ("[ $HOLDFAST_ATTEMPT = 2 ] || exit 75", "", JobStatus.SUCCEEDED),
    ],
    ids=["succeeded", "failed", "setup", "restarted"],
)
def test_a_job_that_has_ended_has_no_secrets(
    harness: JobHarness, run: str, setup: str, expected: JobStatus
) -> None:
    job = harness.submit(f"[ $TOKEN = {SECRET[:3]}* ]; {run}", setup=setup, TOKEN=SECRET)
    assert harness.wait(job).status is expected
    wait_without_secrets(harness, job)
    check_usable(harness, job)


def test_a_cancelled_job_has_no_secrets(harness: JobHarness) -> None:
    job = harness.submit(WAITS, head="num_nodes: 2", TOKEN=SECRET)
    harness.wait_for_output(job, "up", node=1)
    plans = [f"attempts/1/{rank}/plan.json" for rank in (0, 1)]
    assert sorted(secrets_in(harness, job)) == [*plans, "environment.json"], "while it runs"
    harness.cancel(job)
    wait_without_secrets(harness, job)
    check_usable(harness, job)


def test_jobs_that_never_start_have_no_secrets(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is cancelled while it waits for GPUs, and the launch of another is refused after its files."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu = "resources: {accelerators: A100:1}"
    running = harness.submit(WAITS, head=gpu)
    harness.wait_for_output(running, "up")
    waiting = harness.submit("true", head=gpu, TOKEN=SECRET)
    assert secrets_in(harness, waiting) == ["environment.json"]
    harness.cancel(waiting)
    wait_without_secrets(harness, waiting)
    with pytest.raises(Exception, match="Cannot clone"):
        harness.submit("true", head=f"workdir: {{url: 'file://{harness.folder}/none'}}", TOKEN=SECRET)
    assert sorted(path.name for path in (harness.state / "jobs").glob("[0-9]*")) == ["1", "2"]
    harness.finish(running)


def kill_controllers(harness: JobHarness, job: Job) -> bool:
    """Kill the job's controllers and their guardians; return True if none is left."""
    processes.kill(harness.roles(job, "controller"))
    return not harness.roles(job, "controller")


@pytest.mark.parametrize("point", ["jobs.ended", "jobs.plans"])
def test_the_next_command_removes_secrets_that_a_killed_controller_has_left(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    # Without a mark, so that it kills each controller that the guardian, or an agent at its end, starts.
    monkeypatch.setenv("HOLDFAST_KILL_AT", point)
    job = harness.submit("true", TOKEN=SECRET)
    monkeypatch.delenv("HOLDFAST_KILL_AT")
    harness.wait_for(job, lambda: harness.record(job).state.job_state.status.is_final, "the end of the job")
    harness.wait_for(job, lambda: not harness.roles(job, "agent"), "the end of the agent")
    harness.wait_for(job, lambda: kill_controllers(harness, job), "the end of the controllers")
    assert "environment.json" in secrets_in(harness, job)
    assert harness.engine.job(job.id).status is JobStatus.SUCCEEDED
    assert not secrets_in(harness, job)
    check_usable(harness, job)


def test_files_that_killed_processes_have_left_are_removed_too(harness: JobHarness) -> None:
    job = harness.submit(WAITS, TOKEN=SECRET)
    harness.wait_for_output(job, "up")
    files = harness.files(job)
    text = files.node(1, 0).plan.read_bytes()
    making = files.attempt(1) / ".0.4711"
    making.mkdir()
    for path in (files.path / ".environment.json.x1", making / "plan.json", making / ".plan.json.x2"):
        path.write_bytes(text)
    damaged = files.attempt(1) / "1"
    damaged.mkdir()
    (damaged / "plan.json").write_bytes(text[:-9])
    (files.workdir(0) / "go").touch()
    harness.wait(job)
    wait_without_secrets(harness, job)


def test_credentials_of_a_cloned_repository_are_removed(harness: JobHarness, tmp_path: Path) -> None:
    """Only from the job's own clone: a link in its place leads to a file of the user."""
    own = tmp_path / "own-config"
    own.write_text(f"[remote]\nurl = https://me:{SECRET}@host/x.git\n")
    job = harness.submit(WAITS)
    harness.wait_for_output(job, "up")
    workdir = harness.files(job).workdir(0)
    subprocess.run(["git", "init", "--quiet", workdir], check=True)
    url = f"https://{SECRET}@host.example/gpt.git"
    subprocess.run(["git", "-C", workdir, "remote", "add", "origin", url], check=True)
    (workdir / ".git" / "modules" / "sub").mkdir(parents=True)
    (workdir / ".git" / "modules" / "sub" / "config").symlink_to(own)
    (workdir / "go").touch()
    harness.wait(job)
    harness.wait_for(job, lambda: SECRET not in (workdir / ".git" / "config").read_text(), "the removal")
    words = ["git", "-C", workdir, "remote", "get-url", "origin"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert shown.stdout == "https://host.example/gpt.git\n"
    assert SECRET in own.read_text()
