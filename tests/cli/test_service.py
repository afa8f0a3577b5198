"""`holdfast service` with recorded programs, and a restart of the machine as cron runs the line."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.jobs.node import processes
from holdfast.jobs.records import Records
from holdfast.jobs.service.boot_command import service_name
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness
from jobs.service.fakes import FakePrograms

if TYPE_CHECKING:
    from cli.conftest import Command

WAITS = "echo attempt $HOLDFAST_ATTEMPT is up; until [ -e go ]; do sleep 0.02; done"
MINE = b"# mine\n5 4 * * * echo 'a%b' \xff\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    """A machine without systemd and cron, on which the test installs them."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    return FakePrograms(tmp_path / "bin", monkeypatch)


def test_systemd_comes_first_and_twice_is_once(holdfast: Command, programs: FakePrograms) -> None:
    programs.add_cron()
    programs.add_systemd()
    first = holdfast("service", "install")
    assert (first.status, first.err) == (0, "")
    found = holdfast("service", "status", "--json")
    unit = f"{found.json['name']}.service"
    assert found.status == 0
    assert found.json["way"] == "systemd"
    assert found.json["problems"] == []
    assert Path(found.json["place"]).name == unit
    enabled = [words for words in programs.calls("systemctl") if "show-environment" not in words]
    assert enabled == ["--user daemon-reload", f"--user enable {unit}"]
    assert [words for words in programs.calls("loginctl") if "enable" in words]
    assert holdfast("service", "install").status == 0
    again = [words for words in programs.calls("systemctl") if "show-environment" not in words]
    assert again == enabled, "nothing was changed"
    assert programs.table is None
    assert programs.units() == [
        "systemd",
        "systemd/user",
        "systemd/user/default.target.wants",
        f"systemd/user/default.target.wants/{unit}",
        f"systemd/user/{unit}",
    ]
    assert holdfast("service", "uninstall").out.startswith("removed")
    assert programs.units() == []
    assert holdfast("service", "status").status == 1
    assert "nothing was removed" in holdfast("service", "uninstall").out


def test_without_the_permission_to_linger_the_remedy_is_shown(
    holdfast: Command, programs: FakePrograms
) -> None:
    programs.add_systemd(allows_linger=False)
    result = holdfast("service", "install")
    assert result.status == 0
    assert "sudo loginctl enable-linger" in result.err
    assert "sudo loginctl enable-linger" in holdfast("service", "status").err
    programs.set("loginctl.lingers")
    assert holdfast("service", "status").err == ""


def test_cron_takes_over_from_systemd_and_back(holdfast: Command, programs: FakePrograms) -> None:
    programs.add_cron()
    programs.add_systemd()
    programs.table = MINE
    assert holdfast("service", "install", "--with", "cron", "--json").json["way"] == "cron"
    assert programs.table != MINE
    assert holdfast("service", "install", "--json").json["way"] == "cron", "the present way"
    assert holdfast("service", "install", "--with", "systemd", "--json").json["way"] == "systemd"
    assert programs.table == MINE
    assert holdfast("service", "install", "--with", "cron", "--json").json["way"] == "cron"
    assert programs.units() == []


def test_a_unit_that_systemd_refuses_leaves_nothing(holdfast: Command, programs: FakePrograms) -> None:
    programs.add_systemd()
    programs.set("systemctl.refuses")
    result = holdfast("service", "install")
    assert result.status == 2
    assert "Unit file does not exist." in result.err
    assert "--with cron" in result.err
    assert programs.units() == []


def test_a_machine_with_neither_shows_the_way_out(holdfast: Command, programs: FakePrograms) -> None:
    result = holdfast("service", "install")
    assert result.status == 2
    assert "crontab is not installed" in result.err
    assert "holdfast.cli service start" in result.err
    for way in ("cron", "systemd"):
        assert holdfast("service", "install", "--with", way).status == 2
    assert holdfast("service", "status", "--with", "cron").status == 2
    assert holdfast("service", "status").status == 1


def test_a_crontab_that_cannot_be_read_is_never_replaced(holdfast: Command, programs: FakePrograms) -> None:
    programs.add_cron()
    programs.table = MINE
    programs.set("crontab.refuses")
    result = holdfast("service", "install")
    assert result.status == 2
    assert "not allowed" in result.err
    assert programs.table == MINE
    assert set(programs.calls("crontab")) == {"-l"}


def test_each_state_folder_has_its_own_line(
    holdfast: Command, programs: FakePrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_cron()
    programs.table = MINE
    for name in ("one % 'q'", "two"):
        monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / name))
        for _ in range(2):
            assert holdfast("service", "install").status == 0
    table = (programs.folder / "crontab.table").read_bytes()
    assert table.startswith(MINE)
    lines = table.removeprefix(MINE).splitlines()
    names = [service_name(tmp_path / name) for name in ("one % 'q'", "two")]
    assert [line.split()[-1].decode() for line in lines] == names
    assert holdfast("service", "uninstall").status == 0
    assert programs.table == MINE + lines[0] + b"\n"
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "one % 'q'"))
    assert holdfast("service", "uninstall").status == 0
    assert programs.table == MINE


def test_an_empty_crontab_is_removed(holdfast: Command, programs: FakePrograms) -> None:
    programs.add_cron()
    holdfast("service", "install")
    assert programs.table is not None
    holdfast("service", "uninstall")
    assert programs.table is None
    assert programs.calls("crontab")[-1] == "-r"


def test_a_line_of_another_python_is_reported_and_replaced(
    holdfast: Command, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_cron()
    holdfast("service", "install")
    monkeypatch.setattr("sys.executable", "/elsewhere/python")
    assert "another Python" in holdfast("service", "status").err
    holdfast("service", "install")
    assert "another Python" not in holdfast("service", "status").err
    assert programs.table is not None
    assert programs.table.count(b"\n") == 1


def test_a_line_break_in_the_folder_is_refused(
    holdfast: Command, programs: FakePrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_cron()
    monkeypatch.setenv("HOLDFAST_STATE", f"{tmp_path}/a\nb")
    assert holdfast("service", "install").status == 2
    assert programs.table is None


def test_a_folder_that_is_not_mounted_is_an_error(
    holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "missing"))
    result = holdfast("service", "start")
    assert result.status == 2
    assert "does not exist" in result.err
    assert not (tmp_path / "missing").exists()


def test_jobs_continue_when_cron_runs_the_line_after_a_restart(
    holdfast: Command, jobs: JobHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = jobs.submit("true")
    jobs.wait(ended)
    running = [jobs.submit(WAITS), jobs.submit(WAITS, head="num_nodes: 2")]
    for job in running:
        jobs.wait_for_output(job, "attempt 1 is up")
        jobs.wait(job, JobStatus.RUNNING)
    with monkeypatch.context() as patch:
        programs = FakePrograms(tmp_path / "bin", patch)
        programs.add_cron()
        assert holdfast("service", "install", "--json").json["starts"] == [job.id for job in running]
        assert programs.table is not None
        line = programs.table.decode().strip().removeprefix("@reboot ").replace("\\%", "%")
    records = Records(jobs.state)
    for job in running:
        everything = [*jobs.roles(job, "controller"), *jobs.roles(job, "agent")]
        processes.kill(everything)
        processes.kill(jobs.of_job(job))
        _be_of_an_earlier_boot(records, job.id)
    # As cron does: no environment but this, and the home as the current folder.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SHELL": "/bin/sh", "LOGNAME": "me"}
    subprocess.run(["/bin/sh", "-c", line], env=environment, cwd=tmp_path, check=True)
    said = (jobs.state / "service.log").read_text()
    assert said == "".join(f"job {job.id} ({job.name}) is RECOVERING\n" for job in running)
    for job in running:
        jobs.wait_for(job, lambda job=job: "attempt 2 is up" in jobs.log(job), "the second attempt")
        for rank in range(job.num_nodes):
            (jobs.files(job).workdir(rank) / "go").touch()
        assert jobs.wait(job).status is JobStatus.SUCCEEDED


def _be_of_an_earlier_boot(records: Records, number: int) -> None:
    """Change a job's record as if the machine had been restarted since."""
    record = records.get(number)
    assert record.clock is not None
    earlier = dataclasses.replace(record.clock, boot_id="an-earlier-boot")
    records.save(
        dataclasses.replace(record, clock=earlier),
        record.job_state,
        record.due,
        now_unix_s=record.submitted_unix_s,
        step_before=record.step_before,
    )
