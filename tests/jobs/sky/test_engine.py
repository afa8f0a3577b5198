"""The SkyPilot engine with a program that answers like `sky` and records its calls."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from holdfast.errors import Conflict, NotFound, RetryLater, Unsupported
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.output import OutputSelection
from holdfast.jobs.registry import find_engine
from holdfast.jobs.sky.engine import SkyEngine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import Overrides, parse_tasks

PROGRAM = """#!/bin/bash
cd {folder}
printf '%s\\n' "$*" >> calls
case "$*" in
  --version) echo "skypilot, version 0.14.1" ;;
  "jobs launch"*) [ -e refuse ] && {{ echo "no cloud access" >&2; exit 1; }}
    echo "token=$TOKEN python=$PYTHONPATH" >> calls
    [ -e mute ] || printf 'Managed Job ID: \\033[1m17\\033[0m\\n' ;;
  "jobs queue"*) [ -e down ] && {{ echo "no server" >&2; exit 1; }}; cat queue.json ;;
  "jobs cancel"*) : ;;
  "jobs logs"*) printf '(gpt-1, pid=3) \\033[32mhello\\033[0m\\nbye\\n' ;;
esac
"""
TASK = "name: gpt\nsecrets: {TOKEN: null}\nrun: python train.py\n"


class FakeSky:
    """Substitute for `sky`, with its answers and recorded calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "sky"
        self.program.write_text(PROGRAM.format(folder=folder))
        self.program.chmod(0o755)
        self.report()

    def report(self, **facts: object) -> None:
        """Set the queue: job 17, or nothing without arguments."""
        row = {"job_id": 17, "job_name": "gpt-1", **facts}
        (self.folder / "queue.json").write_text(json.dumps([row] if facts else []))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def be(self, how: str, *, yes: bool = True) -> None:
        path = self.folder / how
        path.touch() if yes else path.unlink()


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSky:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    folder = tmp_path / "sky"
    folder.mkdir()
    found = FakeSky(folder)
    monkeypatch.setenv("HOLDFAST_SKY", str(found.program))
    return found


def submit() -> tuple[SkyEngine, int]:
    engine = SkyEngine()
    file = parse_tasks(TASK, "task.yaml", Overrides(secrets={"TOKEN": "abc123"}))
    return engine, engine.submit_file(file)[0].id


def test_a_job_is_submitted_with_its_secrets_in_the_environment_only(
    sky: FakeSky, capsys: pytest.CaptureFixture[str]
) -> None:
    _engine, number = submit()
    version, launched, seen, *_ = sky.calls()
    words = launched.split()
    assert version == "--version"
    assert words[:-1] == ["jobs", "launch", "-y", "-d", "-n", "gpt-1", "--secret", "TOKEN"]
    assert seen == "token=abc123 python="
    assert "skypilot, version 0.14.1" in capsys.readouterr().err
    text = Path(words[-1]).read_text()
    assert "abc123" not in text
    job = find_engine(number).job(number)
    assert yaml.safe_load(text)["envs"]["HOLDFAST_TASK_ID"] == job.task_id


def test_the_status_is_skypilot_s_until_the_job_has_ended(sky: FakeSky) -> None:
    engine, number = submit()
    assert "does not have a job named" in engine.job(number).reason
    sky.report(status="RUNNING", start_at=5.0)
    running = engine.job(number)
    assert (running.status, running.attempt, running.started_unix_s) == (JobStatus.RUNNING, 1, 5.0)
    sky.report(status="RECOVERING", recovery_count=1, start_at=5.0)
    assert (engine.job(number).status, engine.job(number).recoveries) == (JobStatus.RECOVERING, 1)
    sky.be("down")
    told = engine.job(number)
    assert (told.status, told.recoveries) == (JobStatus.RECOVERING, 1), "as it was when it was last looked at"
    assert told.reason.splitlines()[0] == "SkyPilot does not answer", "the row of `queue`"
    assert "no server" in told.reason
    sky.be("down", yes=False)
    sky.report(status="SUCCEEDED", recovery_count=2, start_at=5.0, end_at=9.0)
    ended = engine.job(number)
    assert (ended.status, ended.recoveries, ended.ended_unix_s) == (JobStatus.SUCCEEDED, 2, 9.0)
    num_calls = len(sky.calls())
    assert engine.jobs() == [ended]
    assert len(sky.calls()) == num_calls, "nobody is asked about what has ended"


def test_a_job_whose_id_was_not_printed_is_found_by_its_name(sky: FakeSky) -> None:
    sky.be("mute")
    engine, number = submit()
    with pytest.raises(Conflict, match="has not assigned an id"):
        engine.cancel(number)
    sky.report(status="RUNNING", start_at=1.0)
    engine.cancel(number)
    assert "jobs cancel -y --graceful 17" in sky.calls()


def test_a_job_that_skypilot_rejects_is_not_listed(sky: FakeSky) -> None:
    sky.be("refuse")
    with pytest.raises(RetryLater, match="no cloud access"):
        submit()
    assert SkyEngine().jobs() == []


def test_output_has_no_colours(sky: FakeSky) -> None:
    engine, number = submit()
    lines = engine.lines(number, OutputSelection(follow=True))
    assert [line.text for line in lines] == ["(gpt-1, pid=3) hello", "bye"]
    assert sky.calls()[-1] == "jobs logs --follow 17"


def test_output_ends_with_the_command_whatever_daemon_it_has_started(sky: FakeSky) -> None:
    """The server of SkyPilot has inherited the command's output."""
    engine, number = submit()
    sky.program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {sky.folder}/daemon\nprintf 'hello\\nbye'\n")
    try:
        lines = [line.text for line in engine.lines(number, OutputSelection())]
    finally:
        os.kill(int((sky.folder / "daemon").read_text()), signal.SIGKILL)
    assert lines == ["hello", "bye"]


def test_an_unsupported_request_is_reported(sky: FakeSky) -> None:
    engine, number = submit()
    with pytest.raises(Unsupported, match="managed job 17"):
        engine.preempt(number, lead_s=1)
    sky.report(status="CANCELLED", start_at=1.0, end_at=2.0)
    with pytest.raises(Conflict, match="has already ended"):
        engine.cancel(number)


def test_only_a_job_that_has_ended_is_removed(sky: FakeSky) -> None:
    engine, number = submit()
    sky.report(status="RUNNING", start_at=1.0)
    with pytest.raises(Conflict):
        engine.forget(number)
    sky.report(status="SUCCEEDED", start_at=1.0, end_at=2.0)
    engine.forget(number)
    with pytest.raises(NotFound):
        engine.job(number)
    assert not job_folder(state_dir(), number).path.exists()
