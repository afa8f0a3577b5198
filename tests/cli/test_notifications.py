"""`holdfast launch --notify`, and its results in `holdfast describe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.harness import JobHarness

if TYPE_CHECKING:
    from cli.conftest import Command


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text("run: 'true'\n")
    return path


def test_notifications_of_a_launch_are_described(
    holdfast: Command, jobs: JobHarness, task: Path, tmp_path: Path
) -> None:
    out = tmp_path / "received"
    words = ("--notify", f'echo "$HOLDFAST_JOB_STATUS" >> {out}', "--notify", "exit 9")
    launched = holdfast("launch", task, *words, "--notify-on", "running,ended", "--json")
    job = jobs.engine.job(launched.json["id"])
    jobs.wait_for(job, lambda: not jobs.files(job).notify_plan.exists(), "the last notification")
    assert out.read_text() == "RUNNING\nSUCCEEDED\n"
    shown = holdfast("describe", job.id).out
    assert "2 sent; RUNNING not sent to command 2 (exit status 9); SUCCEEDED not sent to command 2" in shown
    found = holdfast("describe", job.id, "--json").json["notifications"]
    for target, error in (("command 1", ""), ("command 2", "exit status 9")):
        results = [(one["status"], one["error"]) for one in found if one["target"] == target]
        assert results == [("RUNNING", error), ("SUCCEEDED", error)], target


def test_each_job_of_a_pipeline_notifies(
    holdfast: Command, jobs: JobHarness, task: Path, tmp_path: Path
) -> None:
    out = tmp_path / "received"
    task.write_text("name: p\n---\nname: a\nrun: 'true'\n---\nname: b\nrun: exit 3\n---\nname: c\nrun: x\n")
    words = ("--notify", f'echo "$HOLDFAST_JOB_NAME $HOLDFAST_JOB_STATUS" >> {out}')
    for one in holdfast("launch", task, *words, "--json").json:
        job = jobs.engine.job(one["id"])
        jobs.wait_for(job, lambda job=job: not jobs.files(job).notify_plan.exists(), "the notification")
    assert sorted(out.read_text().splitlines()) == ["a SUCCEEDED", "b FAILED", "c CANCELLED"]


def test_a_dry_run_shows_the_statuses_and_no_target(holdfast: Command, task: Path) -> None:
    shown = holdfast(
        "launch", task, "--dry-run", "--notify", "https://h.example/SECRET", "--notify-on", "failed"
    ).printed("1 target, of FAILED, FAILED_CONTROLLER, FAILED_SETUP")
    assert "SECRET" not in shown.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--notify", "ftp://h/SECRET"), "number 1"),
        (("--notify", "true", "--notify-on", "done"), "unknown status"),
        (("--notify-on", "failed"), "needs --notify"),
        (("--notify", "true", "--on", "sky"), "do not send notifications"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_starts(
    holdfast: Command, jobs: JobHarness, task: Path, words: tuple[str, ...], expected: str
) -> None:
    result = holdfast("launch", task, *words).refused(expected)
    assert "SECRET" not in result.err
    assert jobs.engine.jobs() == []


def test_the_variable_is_ignored_with_a_message_where_nothing_can_be_sent(
    holdfast: Command, jobs: JobHarness, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_NOTIFY", "true")
    result = holdfast("launch", task, "--on", "sky", "--dry-run").printed()
    assert "HOLDFAST_NOTIFY is ignored" in result.err
