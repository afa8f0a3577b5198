"""`holdfast service` with recorded programs, and a restart of the machine without systemd."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from holdfast.jobs.node import processes
from holdfast.jobs.records import Records
from holdfast.jobs.service import service_name
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness
from jobs.service.fakes import FakePrograms

if TYPE_CHECKING:
    from cli.conftest import Command

WAITS = "echo attempt $HOLDFAST_ATTEMPT is up; until [ -e go ]; do sleep 0.02; done"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    """A machine without systemd, on which the test installs it."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    return FakePrograms(tmp_path / "bin", monkeypatch)


def test_it_is_installed_once(holdfast: Command, programs: FakePrograms) -> None:
    programs.add_systemd()
    first = holdfast("service", "install")
    assert (first.status, first.err) == (0, "")
    found = holdfast("service", "status", "--json")
    unit = f"{found.json['name']}.service"
    assert found.status == 0
    assert found.json["problems"] == []
    assert Path(found.json["unit"]).name == unit
    enabled = [words for words in programs.calls("systemctl") if "show-environment" not in words]
    assert enabled == ["--user daemon-reload", f"--user enable {unit}"]
    assert [words for words in programs.calls("loginctl") if "enable" in words]
    assert holdfast("service", "install").status == 0
    again = [words for words in programs.calls("systemctl") if "show-environment" not in words]
    assert again == enabled, "nothing was changed"
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
    for action in ("install", "status"):
        holdfast("service", action).refused("sudo loginctl enable-linger", status=0)
    programs.set("loginctl.lingers")
    assert holdfast("service", "status").err == ""


def test_a_machine_without_systemd_shows_the_command(holdfast: Command, programs: FakePrograms) -> None:
    result = holdfast("service", "install").refused()
    found = holdfast("service", "status", "--json")
    assert found.status == 1
    assert found.json["unit"] is None
    line = found.json["command"]
    assert "holdfast.cli service start" in line
    assert line in result.err
    assert line in holdfast("service", "status").out
    assert programs.units() == []


def test_a_unit_of_another_python_is_reported_and_replaced(
    holdfast: Command, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_systemd()
    holdfast("service", "install")
    before = programs.units()
    monkeypatch.setattr("sys.executable", "/elsewhere/python")
    assert "another Python" in holdfast("service", "status").err
    holdfast("service", "install")
    assert "another Python" not in holdfast("service", "status").err
    assert programs.units() == before


def test_each_state_folder_has_its_own_unit(
    holdfast: Command, programs: FakePrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_systemd()
    names = ("one % 'q'", "two")
    for name in names:
        monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / name))
        assert holdfast("service", "install").status == 0
    assert holdfast("service", "uninstall").status == 0
    units = [Path(unit).name for unit in programs.units() if unit.endswith(".service")]
    assert set(units) == {f"{service_name(tmp_path / names[0])}.service"}


def test_a_line_break_in_the_folder_and_a_refusal_of_systemd_leave_nothing(
    holdfast: Command, programs: FakePrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.add_systemd()
    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_STATE", f"{tmp_path}/a\nb")
        holdfast("service", "install").refused()
    assert programs.units() == []
    programs.set("systemctl.refuses")
    holdfast("service", "install").refused("Unit file does not exist.", "run as this user after each start")
    assert programs.units() == []


def test_a_folder_that_is_not_mounted_is_an_error(
    holdfast: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "missing"))
    holdfast("service", "start").refused("does not exist")
    assert not (tmp_path / "missing").exists()


def test_jobs_continue_when_the_command_runs_after_a_restart(
    holdfast: Command, jobs: JobHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = jobs.submit("true")
    jobs.wait(ended)
    running = [jobs.submit(WAITS), jobs.submit(WAITS, head="num_nodes: 2")]
    for job in running:
        jobs.wait_running(job, "attempt 1 is up")
    with monkeypatch.context() as patch:
        FakePrograms(tmp_path / "bin", patch)
        found = holdfast("service", "status", "--json").json
        assert found["starts"] == [job.id for job in running]
        line = found["command"]
    records = Records(jobs.state)
    for job in running:
        everything = [*jobs.roles(job, "controller"), *jobs.roles(job, "agent")]
        processes.kill(everything)
        processes.kill(jobs.of_job(job))
        _be_of_an_earlier_boot(records, job.id)
    # As by cron: no environment but this, and the home as the current folder.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SHELL": "/bin/sh", "LOGNAME": "me"}
    words = ["/bin/sh", "-c", line]
    done = subprocess.run(words, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "".join(f"job {job.id} ({job.name}) is RECOVERING\n" for job in running)
    for job in running:
        jobs.wait_for(job, lambda job=job: "attempt 2 is up" in jobs.log(job), "the second attempt")
        for rank in range(job.num_nodes):
            (jobs.files(job).workdir(rank) / "go").touch()
        assert jobs.wait(job).status is JobStatus.SUCCEEDED


def _be_of_an_earlier_boot(records: Records, number: int) -> None:
    """Change a job's record as if the machine had been restarted since."""
    record = records.get(number)
    assert record.state.clock is not None
    earlier = replace(record.state.clock, boot_id="an-earlier-boot")
    records.save(record.with_state(clock=earlier, unix_s=record.job.submitted_unix_s))
