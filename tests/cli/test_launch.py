"""`holdfast launch`, `queue`, `logs`, `cancel` and `preempt`: output and exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Command, runs_without_torch
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

TASK = """
name: greet
resources:
  accelerators:
    A100:1
    H100:1
  use_spot: true
envs:
  WHO:
run: |
  echo hello $WHO
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(TASK)
    return path


def test_a_job_is_launched_listed_and_read(jobs: JobHarness, task: Path, holdfast: Command) -> None:
    result = holdfast("launch", task, "--env", "WHO=you", "--name", "mine").printed()
    assert result.out.startswith("job 1 (mine) was submitted")
    assert "read as the set {A100:1, H100:1}" in result.err
    job = jobs.engine.job(1)
    jobs.wait(job)
    (row,) = holdfast("queue", "--json").json
    assert (row["id"], row["name"], row["status"], row["recoveries"]) == (1, "mine", "SUCCEEDED", 0)
    assert row["task_id"] == job.task_id
    assert "SUCCEEDED" in holdfast("queue").out
    lines = holdfast("logs", 1).out.splitlines()
    assert lines[1:] == ["hello you"]
    assert "attempt 1 of job 1 starts" in lines[0]


def test_attaching_shows_the_output_and_ends_with_the_status_of_the_job(
    jobs: JobHarness, task: Path, holdfast: Command
) -> None:
    result = holdfast("launch", task, "--env", "WHO=you", "--attach").printed("hello you")
    assert "job 1 is SUCCEEDED" in result.err
    task.write_text("run: echo oh no; exit 3\n")
    said = "job 2 is FAILED: node 0 failed in run with status 3"
    holdfast("launch", task, "--attach").refused(said, status=1)


def test_following_ends_with_the_job(jobs: JobHarness, task: Path, holdfast: Command) -> None:
    task.write_text("num_nodes: 2\nrun: echo node $SKYPILOT_NODE_RANK here\n")
    assert holdfast("launch", task).status == 0
    holdfast("logs", 1, "-f").printed("(node 0) node 0 here", "(node 1) node 1 here")
    holdfast("logs", 1, "--json").printed('{"node": 0, "line": "node 0 here", "unix_s": ')


def test_a_dry_run_shows_the_plan_and_starts_nothing(jobs: JobHarness, task: Path, holdfast: Command) -> None:
    words = ["launch", task, "--env", "WHO=you", "--dry-run"]
    holdfast(*words).printed("resources.use_spot", "nothing was started")
    plan = holdfast(*words, "--json").json
    unsupported = [row["key"] for row in plan["unsupported_keys"]]
    assert unsupported == ["resources.accelerators", "resources.use_spot"]
    assert "A100: 1" in plan["task"]
    assert jobs.engine.jobs() == []


def test_a_dry_run_shows_the_python_of_the_commands(
    jobs: JobHarness, task: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jobs.folder / "first"
    first.mkdir()
    (first / "python3").symlink_to(sys.executable)
    words = ["launch", task, "--env", "WHO=you", "--dry-run"]
    monkeypatch.setenv("PATH", f"{first}:{os.environ['PATH']}")
    assert re.search(rf"python +{first}/python3, the first on the PATH", holdfast(*words).out)
    assert "the first on the PATH" not in holdfast(*words, "--on", "slurm").out, "nodes have their own"


def test_an_invalid_task_file_is_reported_line_by_line(
    jobs: JobHarness, task: Path, holdfast: Command
) -> None:
    task.write_text(TASK.replace("use_spot", "use_spto"))
    holdfast("launch", task).refused(
        f"{task}:7: resources.use_spto: unknown key 'use_spto'",
        f"{task}:9: envs.WHO: WHO has no value: give it here, or with --env WHO=VALUE",
    )


def test_a_variable_without_value_is_copied_from_the_environment(
    jobs: JobHarness, task: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "me")
    assert "WHO=me" in holdfast("launch", task, "--env", "WHO", "--dry-run").out
    assert holdfast("launch", task, "--env", "NOBODY_HAS_SET_THIS").status == 2
    for wrong in ("=x", "A B=1", "1A=x"):
        holdfast("launch", task, "--env", wrong).refused("with the name of a variable")


def test_secrets_are_passed_to_the_job_and_never_shown(
    jobs: JobHarness, task: Path, holdfast: Command
) -> None:
    task.write_text("secrets: {TOKEN: null}\nrun: test ${#TOKEN} = 6\n")
    for words in (["--dry-run"], ["--dry-run", "--json"]):
        assert "abc123" not in holdfast("launch", task, "--secret", "TOKEN=abc123", *words).out
    assert holdfast("launch", task, "--secret", "TOKEN=abc123", "--attach").status == 0


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize(("engine", "program"), [("slurm", "sbatch"), ("sky", "sky")])
def test_a_missing_engine_is_reported(
    task: Path, holdfast: Command, engine: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(task.parent))
    holdfast("launch", task, "--env", "WHO=you", "--on", engine).refused(f"{program} ")
    assert holdfast("queue").out == "no jobs\n"


@pytest.mark.parametrize(
    ("engine", "submitted"),
    [
        ("slurm", "#SBATCH --requeue"),
        ("sky", "$ sky jobs launch -y -d"),
        ("k8s", "kind: Job"),
        ("kubeflow", "kind: PyTorchJob"),
    ],
)
def test_a_dry_run_shows_the_submission_to_other_engines_and_can_write_it(
    jobs: JobHarness, task: Path, holdfast: Command, engine: str, submitted: str, tmp_path: Path
) -> None:
    task.write_text(TASK.replace("  use_spot", "  image_id: docker:greeter\n  use_spot"))
    words = ["launch", task, "--env", "WHO=you", "--on", engine, "--dry-run"]
    holdfast(*words).printed(submitted)
    plan = holdfast(*words, "--json").json
    assert any(submitted in line for line in plan["rendered"])
    assert (plan["engine"], holdfast("queue").out) == (engine, "no jobs\n")
    if engine != "sky":
        result = holdfast(*words, "-o", tmp_path / "out")
        assert result.out == f"{tmp_path / 'out'} was written, and nothing was started\n"
        assert "resources.use_spot" in result.err
        written = (tmp_path / "out").read_text()
        assert written.startswith("#")  # the command line is left out
        assert holdfast(*words, "-o", "-").out == written
        assert holdfast(*words, "-o", tmp_path / "missing" / "out").status == 2


def test_options_of_a_dry_run_are_refused_where_they_have_no_effect(
    jobs: JobHarness, task: Path, holdfast: Command
) -> None:
    holdfast("launch", task, "--env", "WHO=you", "-o", "-").refused("-o is for --dry-run")
    result = holdfast("launch", task, "--env", "WHO=you", "--dry-run", "-o", "-")
    assert result.refused("local submits nothing to another system").out == ""


@pytest.mark.parametrize("engine", ["k8s", "kubeflow"])
def test_a_launch_on_kubernetes_names_the_commands_that_do_it(
    jobs: JobHarness, task: Path, holdfast: Command, engine: str
) -> None:
    task.write_text("resources: {image_id: docker:a}\nrun: x\n")
    holdfast("launch", task, "--on", engine).refused(f"--on {engine} --dry-run -o job.yaml")
    assert holdfast("queue", "--on", engine).out == "no jobs\n"
    task.write_text("secrets: {TOKEN: null}\nworkdir: {url: 'https://${TOKEN}@host/a'}\nrun: x\n")
    assert "abc123" not in holdfast("launch", task, "--secret", "TOKEN=abc123", "--dry-run").out


def test_a_command_is_launched_in_a_copy_of_the_current_folder(
    jobs: JobHarness, tmp_path: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.chdir(tmp_path / "here")
    words = [sys.executable, "train.py", "--lr", "a b", "$HOME"]
    holdfast("launch", "--attach", "--", *words).printed("['--lr', 'a b', '$HOME']")
    result = holdfast("launch", "--attach", "-n", "two", "--", "echo $A && pwd", "--", "x")
    assert (jobs.engine.job(2).name, result.status) == ("two", 1), "several words are a program and arguments"
    assert "a-b" in holdfast("launch", "--attach", "--env", "A=a-b", "--", "echo $A && pwd").out


def test_a_command_does_not_copy_the_whole_home(
    jobs: JobHarness, tmp_path: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    holdfast("launch", "--", "true").refused("give --workdir FOLDER")
    assert holdfast("launch", "--workdir", tmp_path / "none", "--", "true").status == 2
    (tmp_path / "w").mkdir()
    assert holdfast("launch", "--workdir", "w", "--attach", "--", "true").status == 0


def test_a_file_and_a_command_exclude_each_other(jobs: JobHarness, task: Path, holdfast: Command) -> None:
    for words in ([], [task, "--", "true"], ["--"]):
        holdfast("launch", *words).refused("Expected a task file, or -- and a command")


def test_options_override_the_file(jobs: JobHarness, task: Path, tmp_path: Path, holdfast: Command) -> None:
    env = tmp_path / ".env"
    env.write_text("WHO=you\nLR='3e-4'\n")
    (tmp_path / "work").mkdir()
    options = ["--gpus", "T4:2", "--num-nodes", 2, "--workdir", tmp_path / "work"]
    result = holdfast("launch", task, "--env-file", env, "--env", "LR=1", *options, "--dry-run")
    assert "WHO=you, LR=1" in result.out
    assert f"copied from {tmp_path / 'work'}" in result.out
    plan = holdfast("launch", task, "--env-file", env, *options, "--dry-run", "--json").json
    assert (plan["num_nodes"], plan["notes"]) == (2, [])
    assert "accelerators: T4:2" in plan["task"]
    holdfast("launch", task, "--gpus", "T4:x").refused("--gpus T4:x: expected NAME or NAME:COUNT")
    holdfast("launch", task, "--env-file", tmp_path / "no").refused("--env-file")


@pytest.mark.essential
def test_a_pipeline_is_launched_and_followed(jobs: JobHarness, task: Path, holdfast: Command) -> None:
    task.write_text("name: both\n---\nname: a\nrun: echo one\n---\nname: b\nrun: echo two $WHO\n")
    plan = holdfast("launch", task, "--dry-run").out
    assert "task 2 of 2 of pipeline both once the one before has succeeded" in plan
    assert len(holdfast("launch", task, "--dry-run", "--json").json) == 2
    result = holdfast("launch", task, "--env", "WHO=me")
    assert "pipeline both was submitted" in result.out
    assert "1 (a), 2 (b)" in result.out
    assert jobs.wait(jobs.engine.job(2)).status is JobStatus.SUCCEEDED
    result = holdfast("launch", task, "--env", "WHO=you", "--attach")
    assert result.status == 0
    assert result.out.index("one\n") < result.out.index("two you\n")
    task.write_text("run: exit 4\n---\nrun: echo never\n")
    assert holdfast("launch", task, "--attach").status == 1
    jobs.wait(jobs.engine.job(6))
    assert [row["status"] for row in holdfast("queue", "--json").json][:2] == ["CANCELLED", "FAILED"]
    assert holdfast("launch", task, "--on", "k8s", "--dry-run").status == 2


def test_preempting_and_cancelling_from_the_command_line(
    jobs: JobHarness, task: Path, holdfast: Command
) -> None:
    task.write_text("run: |\n  trap 'exit 75' TERM\n  echo ready\n  while true; do sleep 0.02; done\n")
    holdfast("launch", task)
    job = jobs.engine.job(1)
    jobs.wait_running(job, "ready")
    assert "its processes are killed in 1 min 0 s" in holdfast("preempt", 1, "--lead", "60").out
    jobs.wait_for_output(job, "ready", times=2)
    jobs.wait(job, JobStatus.RUNNING)
    assert holdfast("cancel", 1).out == "job 1 (task) is being cancelled\n"
    jobs.wait(job, JobStatus.CANCELLED)
    assert [holdfast(command, 1).status for command in ("cancel", "preempt")] == [2, 2]
    assert holdfast("queue").out.count("CANCELLED") == 1


def test_a_missing_job_an_empty_queue_and_an_invalid_lead_are_reported(
    jobs: JobHarness, holdfast: Command
) -> None:
    for command in ("logs", "cancel", "preempt"):
        holdfast(command, 9).refused("Job 9 does not exist")
    assert holdfast("queue").out == "no jobs\n"
    assert holdfast("queue", "--json").json == []
    for lead in ("-1", "soon"):
        holdfast("preempt", 1, "--lead", lead).refused("--lead")


def test_jobs_need_no_torch(tmp_path: Path, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    runs_without_torch("launch", task, "--env", "WHO=x", "--dry-run")


def test_a_job_survives_its_terminal(jobs: JobHarness, task: Path) -> None:
    """The process group of the launching command is killed while the job runs."""
    task.write_text("run: |\n  echo begun\n  until [ -e go ]; do sleep 0.02; done\n")
    command = [sys.executable, "-m", "holdfast.cli", "launch", str(task), "--attach"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert launcher.stdout is not None
    assert any(line == "begun\n" for line in launcher.stdout)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    job = jobs.engine.job(1)
    jobs.let_go(job)
    assert jobs.succeed(job).attempt == 1
