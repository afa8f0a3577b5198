"""A restart of the machine: `holdfast queue` continues its jobs, and the manual's unit of systemd runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.jobs.node import processes
from holdfast.jobs.records import Records
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

MANUAL = Path(__file__).parents[2] / "docs" / "jobs.md"
WAITS = "echo attempt $HOLDFAST_ATTEMPT is up; until [ -e go ]; do sleep 0.02; done"


def unit() -> str:
    """Return the unit in the manual."""
    (text,) = re.findall(r"```ini\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    return text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "holdfast.service").write_text(unit())
    program = tmp_path / "venv" / "bin" / "holdfast"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    words = ["systemd-analyze", "--user", "verify", str(tmp_path / "holdfast.service")]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_jobs_continue_when_they_are_listed_after_a_restart(jobs: JobHarness, tmp_path: Path) -> None:
    ended = jobs.submit("true")
    jobs.wait(ended)
    running = [jobs.submit(WAITS), jobs.submit(WAITS, head="num_nodes: 2")]
    for job in running:
        jobs.wait_running(job, "attempt 1 is up")
    records = Records(jobs.state)
    for job in running:
        processes.kill([*jobs.roles(job, "controller"), *jobs.roles(job, "agent")])
        processes.kill(jobs.of_job(job))
        _be_of_an_earlier_boot(records, job.id)
    (line,) = [line for line in unit().splitlines() if line.startswith("ExecStart=")]
    words = [sys.executable, "-m", "holdfast.cli", *line.split()[1:]]
    # As by systemd: no environment but this, and the home as the current folder.
    user = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SHELL": "/bin/sh", "LOGNAME": "me"}
    place = {"HOLDFAST_STATE": str(jobs.state), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=user | place, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("RECOVERING") == len(running)
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
